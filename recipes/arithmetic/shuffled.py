r"""A control: the rewards of a batch are dealt out at random, so they say nothing about the responses they stand on.

    python recipes/arithmetic/run.py --name shuffled \
        trainer.plugins=[recipes.arithmetic.shuffled] reward_model.reward_manager=shuffled

A run with this manager must not get better; if it does, something other than the reward teaches.  Means over a batch,
and so validation, are what they were.
"""

from __future__ import annotations

import torch

from rlhub.protocol import DataProto
from rlhub.rewards import ManagerParts, RewardManager, RewardResult
from rlhub.rewards.managers import on_last_token
from rlhub.rewards.registry import REWARD_MANAGERS


class ShuffledRewards:
    """Scores as another manager does, then permutes the scores over the batch."""

    def __init__(self, inner: RewardManager) -> None:
        self.inner = inner
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, batch: DataProto) -> RewardResult:
        result = self.inner(batch)
        result.scores = result.scores[torch.randperm(len(result.scores), generator=self.generator)]
        result.token_level_scores = on_last_token(result.scores, batch.batch["response_mask"])
        return result

    def close(self) -> None:
        self.inner.close()


@REWARD_MANAGERS.register("shuffled")
def build(parts: ManagerParts, knobs: None) -> ShuffledRewards:
    """The naive manager, shuffled."""
    return ShuffledRewards(REWARD_MANAGERS.get("naive")(parts, None))
