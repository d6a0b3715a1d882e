"""Hugging Face models as rlhub trains them: building, tokenizers, LoRA, and the facts of a model's configuration."""
