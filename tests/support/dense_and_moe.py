"""Two tiny models in one folder each: a dense one with a tied head, and a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig


def save_dense_and_moe(root: Path, *, head_dim: int, **sizes: int) -> dict[str, str]:
    """Folders by "dense" and "moe"; sizes: hidden_size, num_attention_heads and num_key_value_heads."""
    common = {"vocab_size": 67, "intermediate_size": 36, "num_hidden_layers": 2, "max_position_embeddings": 64, **sizes}
    configs = {
        "dense": Qwen2Config(**common, tie_word_embeddings=True),
        "moe": Qwen3MoeConfig(**common, head_dim=head_dim, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16),
    }
    for name, config in configs.items():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return {name: str(root / name) for name in configs}
