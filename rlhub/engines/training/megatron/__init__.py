"""Training with Megatron-core: tensor, pipeline, context, expert and data parallel ranks.

engine     the TrainEngine, and the groups of ranks
passes     micro-batches through Megatron-core's pipeline schedules, and from hidden states to log-probs, values and scores
optimizer  AdamW by Megatron-core's optimizers
weights    the stream of full weights, and the pieces of a bit-exact resume
"""
