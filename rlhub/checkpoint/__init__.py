"""Saving and loading: sharded tensors, atomic checkpoint folders, Hugging Face weight files.

store         the checkpoints of a run folder: begin, commit, latest, retain
manifest      manifest.json, which makes a folder a checkpoint
files         the entry of each file with its checksum, and a safetensors writer that hashes while it writes
shards        writes the pieces of every rank
shard_reader  reads any region of a tensor from those pieces, on any rank
hf            writes weights as Hugging Face files

`store`, `manifest` and `files` load no torch, so a driver or a check before start can look at checkpoints cheaply.
"""
