"""Models as rlhub trains them.

shape             the facts of a model's config.json, without torch
tokenizer         the tokenizer, and the token ids that a model can write
hf                Hugging Face models for training, and the files saved with their weights
weight_files      the safetensors files of a model folder, by their headers
required_weights  the weights that a loaded model must have
experts           a mixture of experts: its weights under checkpoint names, and its routers' choices
lora              low-rank adapters
packed_attention  causal attention over packed rows
prefix_attention  attention over rows that share prefixes
device_copies     copies between host and device that nobody waits for
throughput        the floating-point throughput of training
vision            pictures in the prompts of a language model
vla/              vision-language-action policies
megatron/         models of Megatron-core's parts
"""
