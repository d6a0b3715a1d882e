"""Training with FSDP2: parameters, gradients and optimizer state sharded over ranks; packed, padding-free forward passes.

engine    the TrainEngine
building  from a configuration to a sharded model with weights and its optimizer
blocks    what the model's blocks compute again in the backward pass, and their compilation
weights   the layout over the ranks, and the stream of full weights out of the shards
logprob   log-probs and entropy from hidden states, a chunk of tokens at a time
"""
