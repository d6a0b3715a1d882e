"""Sections `reward_model` and `custom_reward_function`: how a response is scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import PositiveFloat, PositiveInt, UnitFloat


@dataclass(slots=True, kw_only=True)
class RewardModelConfig:
    enable: bool = False
    """A learned reward model. Not in this version: rewards are functions."""
    reward_manager: str = "naive"
    """How scores become rewards: naive (the score, on the last token), dapo (with a penalty for overlong responses)."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the manager, for example overlong_buffer_cfg.{enable,len,penalty_factor} of dapo."""
    on_error: Literal["fail", "mask", "zero"] = "mask"
    """A sample whose scoring fails: stop the run, leave it out of training, or score it 0. Failures are counted."""
    max_error_rate: UnitFloat = 0.1
    """With mask or zero: a larger share of failures in a batch stops the run."""
    timeout_s: PositiveFloat = 30.0
    """Longest time to score one sample, in seconds; its process is killed after that."""
    memory_gb: PositiveFloat = 4.0
    """Address space of each reward process, in GiB."""
    num_workers: PositiveInt | None = None
    """Reward processes; null: one per CPU core, at most 4."""


@dataclass(slots=True, kw_only=True)
class CustomRewardConfig:
    path: str | None = None
    """Python file with your reward function; null: chosen by each row's data_source."""
    name: str = "compute_score"
    """The function: (data_source, solution_str, ground_truth, extra_info) -> float or dict with "score"."""
