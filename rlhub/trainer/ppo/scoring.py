"""Scoring a rollout batch, once, whoever asks first: the sampler that looks for groups with signal, or the learner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.registry import suggest
from rlhub.rewards import RewardManager, RewardResult
from rlhub.rollout_service.executor.batches import add_rewards
from rlhub.trainer.ppo.requirements import NAMES_OF_THE_REWARD, requirements
from rlhub.trainer.ppo.validation_metrics import correctness
from rlhub.utils.timing import PhaseTimer

COMPONENT = "reward/"
"""Prefix of the columns that hold the scorer's own numbers."""
SIGNAL = "group_metric"
"""Column (rows,) float64: the number in which the samples of a group are compared."""


@dataclass(slots=True, kw_only=True)
class Scorer:
    """Adds token_level_scores (rows, response), scores (rows,) and valid (rows,) to a batch that has none.

    components: also every number of its own that the scorer returns, as columns `reward/<name>` (rows,) float64.
    metric: also the column `group_metric`, that number of each sample; None: no one compares.
    """

    reward: RewardManager
    timers: PhaseTimer
    components: bool = False
    metric: str | None = None

    def __call__(self, batch: DataProto) -> dict[str, float]:
        """The metrics of scoring; nothing is done for a batch that is scored.  RewardError when failures exceed the limit."""
        columns = batch.batch
        if "token_level_scores" in columns.keys():
            return {}
        with self.timers.measure("reward"):
            result = self.reward(batch)
        columns["token_level_scores"] = result.token_level_scores
        columns["scores"] = result.scores
        columns["valid"] = result.valid
        add_rewards(columns)
        if self.components:
            for name in numeric_entries(result):
                columns[f"{COMPONENT}{name}"] = component(result, name)
        if self.metric is not None:
            result.scores = columns["scores"]
            columns[SIGNAL] = group_metric(result, self.metric)
        return result.metrics


def build_scorer(config: PPOConfig, reward: RewardManager, timers: PhaseTimer) -> Scorer:
    """A scorer that keeps what the chosen estimator and the group filter read."""
    groups = config.algorithm.filter_groups
    return Scorer(
        reward=reward,
        timers=timers,
        components=requirements(config).reward_components,
        metric=groups.metric if groups.enable else None,
    )


def numeric_entries(result: RewardResult) -> list[str]:
    """Names of the extras that are numbers in every row that has them."""
    return [
        name
        for name, column in result.extra.items()
        if all(value is None or isinstance(value, bool | int | float | np.number) for value in column)
    ]


def component(result: RewardResult, name: str) -> Tensor:
    """That number of each row, (rows,) float64; 0 for a row whose scoring failed, which has no entry at all.

    RewardError for a row that was scored and has none, or one that is not finite: whatever stood in for it would be learned.
    """
    values, valid = result.extra[name], result.valid.numpy()
    missing = np.array([value is None for value in values], dtype=bool)
    numbers = np.array([0.0 if value is None else float(value) for value in values], dtype=np.float64)
    too_many = missing.sum() > result.metrics.get("reward/num_failed", 0.0)
    bad = (valid & ~np.isfinite(numbers)) | (valid & missing if too_many else False)
    if bad.any():
        row = int(bad.argmax())
        raise RewardError(
            f"row {row}: the reward function returned {'no' if missing[row] else values[row]} {name!r}, which it gives for other "
            f"rows; expected a finite number in every row. Return {name!r} always, 0 where it does not apply."
        )
    return torch.from_numpy(np.where(valid & ~missing, numbers, 0.0))


def group_metric(result: RewardResult, name: str) -> Tensor:
    """The number of each row by which algorithm.filter_groups compares, (rows,) float64.

    Names of the reward give the reward; `acc` falls back on what validation counts as correct; other names are the scorer's.
    """
    if name in NAMES_OF_THE_REWARD:
        return result.scores.double()
    known = numeric_entries(result)
    if name in known:
        return component(result, name)
    if name == "acc":
        return torch.from_numpy(correctness(result.extra, result.scores.numpy())).double()
    raise RewardError(
        f"algorithm.filter_groups.metric={name}: the reward function returns no such number"
        f"{suggest(name, [*known, *NAMES_OF_THE_REWARD])}; known: seq_reward (the reward itself), acc"
        f"{''.join(f', {other}' for other in known if other != 'acc')}"
    )
