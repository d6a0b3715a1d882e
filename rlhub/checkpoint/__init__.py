"""Saving and loading: sharded tensors, atomic checkpoint folders, Hugging Face weight files.

store         a run folder's checkpoints: begin, commit, latest, retain
manifest      manifest.json, which makes a folder a checkpoint
files         entries with checksums, and a safetensors writer that hashes while it writes
shards        every rank writes the pieces it holds
shard_reader  any rank reads any region from them
hf            weights as Hugging Face files

`store`, `manifest` and `files` load no torch, so a driver or a check before start can look at checkpoints cheaply.
"""
