r"""A control: the rewards of a batch are dealt out at random, so they say nothing about the responses they stand on.

    python recipes/arithmetic/run.py --name shuffled \
        trainer.plugins=[recipes.arithmetic.shuffled] reward_model.reward_manager=shuffled

A run with this manager must not get better; if it does, something other than the reward teaches.  Means over a batch,
and so validation, are what they were.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhub.rewards import ManagerParts, RewardResult
from rlhub.rewards.base import ScoredRows
from rlhub.rewards.managers import NaiveManager
from rlhub.rewards.registry import REWARD_MANAGERS


@REWARD_MANAGERS.register("shuffled")
class ShuffledRewards(NaiveManager):
    """Scores as the naive manager does, then permutes the scores over the batch."""

    def __init__(self, parts: ManagerParts, knobs: Any = None) -> None:
        super().__init__(parts, knobs)
        self.generator = torch.Generator().manual_seed(0)

    def reward(self, rows: ScoredRows) -> RewardResult:
        result = super().reward(rows)
        result.scores = result.scores[torch.randperm(len(result.scores), generator=self.generator)]
        return result
