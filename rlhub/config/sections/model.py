"""Section `model`: which Hugging Face model, and LoRA on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhub.config.schema import NonNegativeInt, PositiveFloat


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    path: str | None = None
    """Model folder or Hugging Face hub name. Required for the actor."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory for about a third more compute. Off for tiny models."""
    use_remove_padding: bool = True
    """Compute on packed rows without padding. Off only if the model's attention cannot be packed."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters; 0: train all weights."""
    lora_alpha: PositiveFloat = 16
    """LoRA scale: updates are multiplied by lora_alpha / lora_rank."""
    target_modules: str | list[str] = "all-linear"
    """Which modules get adapters: all-linear, or a list of module names."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace, for example {attention_dropout: 0.0}."""
