"""Saving and loading: sharded tensors, atomic checkpoint folders, Hugging Face weight files.

`store` and `files` load no torch, so a driver or a check before start can look at checkpoints cheaply.
"""
