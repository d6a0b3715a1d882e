"""Training with Megatron-core: tensor, pipeline, context, expert and data parallel ranks.

engine     the TrainEngine
parallel   the groups of ranks
schedule   micro-batches through Megatron-core's pipeline schedules
heads      from hidden states to log-probs, values and scores
optimizer  AdamW by Megatron-core's optimizers
state      the pieces of a bit-exact resume
weights    streaming full weights to every rank
"""
