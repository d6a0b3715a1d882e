"""Models built of Megatron-core's parts.  Only `checks` may be imported where megatron is not installed.

checks              the problems of a model and a layout, by its config.json alone
compat              Megatron-core on machines without CUDA
transformer_config  Megatron-core's TransformerConfig for a Hugging Face model
model               a rank's piece of the model: layers, packed attention, context parallelism, replayed routing
lora                low-rank adapters in its layers
build               building a model, reading its weights, and its parameters as parts of Hugging Face tensors
"""
