"""What a reward manager is, what it is built from, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from rlhub.protocol import DataProto
from rlhub.rewards.pool import RewardPool


@dataclass(slots=True, kw_only=True)
class RewardResult:
    """The rewards of a batch.

    token_level_scores: (B, T) float32, the score on the last token that the model wrote, 0 elsewhere (a response without such
    a token has no place for it: its row is 0).
    scores: (B,) float32, the rewards themselves.
    valid: (B,) bool; False: scoring failed and the sample must not train.
    extra: what else the reward function and the manager know of each row, (B,) float64, or objects with None where a row has
    no such entry; "acc", where given, is the correctness that validation reports.
    metrics: reward/num_failed, reward/failed_share, and means of the numeric extras under `naive.metric_of` their names.
    """

    token_level_scores: Tensor
    scores: Tensor
    valid: Tensor
    extra: dict[str, np.ndarray]
    metrics: dict[str, float]


class RewardManager(Protocol):
    """Turns a rollout batch into rewards.  Lives in the driver, called by one thread at a time."""

    def __call__(self, batch: DataProto) -> RewardResult:
        """Score all rows.  Blocking.  Raises RewardError when failures exceed what the policy allows."""
        ...

    def close(self) -> None:
        """End the processes behind it."""
        ...


class Decoder(Protocol):
    """The part of a tokenizer that managers use."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]: ...


@dataclass(slots=True, kw_only=True)
class ManagerParts:
    """What every manager is built from: reward_model's settings, ready to use.

    max_response_length: in tokens; max_error_rate: share of failed rows of a batch that on_error mask or zero may pass over.
    """

    pool: RewardPool
    tokenizer: Decoder
    max_response_length: int
    on_error: Literal["fail", "mask", "zero"]
    max_error_rate: float
