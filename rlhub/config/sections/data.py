"""Section `data`: where prompts come from and how long they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhub.config.schema import PositiveInt, Seed


@dataclass(slots=True, kw_only=True)
class DataConfig:
    train_files: str | list[str] | None = None
    """Training prompts: parquet or jsonl, one path or a list. Required."""
    val_files: str | list[str] | None = None
    """Validation prompts, same form; null: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string or a list of chat messages."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens; see filter_overlong_prompts and truncation for what happens to longer ones."""
    max_response_length: PositiveInt = 512
    """Most tokens generated for a prompt."""
    train_batch_size: PositiveInt = 1024
    """Prompts in a training step (each is sampled rollout.n times)."""
    val_batch_size: PositiveInt | None = None
    """Prompts generated at once in validation; null: the whole set."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a prompt over max_prompt_length: stop, or which part to cut away."""
    filter_overlong_prompts: bool = False
    """Leave prompts over max_prompt_length out (counted in the log) before truncation applies."""
    shuffle: bool = True
    """New order in every epoch, from data.seed."""
    seed: Seed = 1
    """Seed of the order of the prompts."""
    apply_chat_template_kwargs: dict[str, Any] | None = None
    """Extra arguments of the tokenizer's chat template, for example {enable_thinking: false}."""
