"""Training with FSDP2: parameters, gradients and optimizer state sharded over ranks; packed, padding-free forward passes.

engine     the TrainEngine
building   from a configuration to a sharded model with weights
sharding   the layout over the ranks, and its view of the weights
logprob    log-probs and entropy from hidden states, a chunk of tokens at a time
optimizer  AdamW on each rank's rows, and the pieces of a bit-exact resume
weights    streaming full weights out of the shards
"""
