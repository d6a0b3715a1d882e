"""Section `data` of training on preference pairs, the same for `main_dpo` and `main_rm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhub.config.schema import PositiveInt, Seed


@dataclass(slots=True, kw_only=True)
class PreferenceDataConfig:
    train_files: str | list[str] | None = None
    """Training pairs: parquet or jsonl, one path or a list. Required."""
    val_files: str | list[str] | None = None
    """Validation pairs, same form; null: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or chat messages; not read where both answers are whole conversations."""
    chosen_key: str = "chosen"
    """Column with the preferred answer: text, the assistant's message, or the whole conversation with it."""
    rejected_key: str = "rejected"
    """Column with the other answer, in the same form."""
    max_length: PositiveInt = 1024
    """Longest prompt and answer together, in tokens."""
    train_batch_size: PositiveInt = 64
    """Pairs in an optimizer step, over all ranks."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Pairs in a forward pass of a rank; null: on GPUs cut by tokens (use_dynamic_bsz), on CPU its whole share at once."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens instead of pairs; a pair is never cut. null: on GPUs, unless micro_batch_size_per_gpu is
    set."""
    max_token_len_per_gpu: PositiveInt | None = None
    """With use_dynamic_bsz: most tokens in a forward pass of a rank; at least 2 x max_length. null: 16384, or 2 x max_length if
    it is more."""
    truncation: Literal["error", "left", "right"] = "error"
    """What to do with a pair over max_length: stop, cut both prompts alike at their start, or the answers at their end."""
    shuffle: bool = True
    """New order in every epoch, from data.seed."""
    seed: Seed = 1
    """Seed of the order of the pairs."""
