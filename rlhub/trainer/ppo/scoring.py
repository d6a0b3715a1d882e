"""Scores of sampled responses: the reward of each row, that of the greedy responses they are compared with, and the numbers of
the reward that an estimator or the group filter reads.

The training step scores every response once, wherever it was sampled.  A reward function may have judged a finished episode
before (episode_scoring.py): then the batch carries what it returned, and only what is made of it for the batch is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.registry import suggest
from rlhub.rewards import RewardManager, RewardResult
from rlhub.rewards.base import FAILED
from rlhub.rollout_service.executor.batches import ADDED, add_rewards
from rlhub.trainer.ppo.requirements import NAMES_OF_THE_REWARD, requirements
from rlhub.trainer.ppo.validation_metrics import correctness
from rlhub.utils.timing import PhaseTimer

COMPONENT = "reward/"
"""Prefix of the columns that hold the scorer's own numbers."""
SIGNAL = "group_metric"
"""Column (rows,) float64: the number in which the samples of a group are compared."""
COUNTS = FAILED
"""Metrics that add up over several scorings; other numbers of the scorer are averaged."""


@dataclass(slots=True, kw_only=True)
class Samples:
    """What a source has sampled.

    batch: the samples of each prompt side by side.  greedy: the most likely response to each of these prompts, in their order;
    None where no estimator compares with it.
    """

    batch: DataProto
    greedy: DataProto | None = None


@dataclass(slots=True, kw_only=True)
class Scorer:
    """Scores samples, and the greedy responses to their prompts where there are any.

    components: also keeps every number of its own that the reward returns, as columns `reward/<name>` (rows,) float64.
    metric: also keeps that number of each sample, as column `group_metric`; None where no samples are compared.
    """

    reward: RewardManager
    timers: PhaseTimer
    components: bool = False
    metric: str | None = None

    def __call__(self, samples: Samples) -> dict[str, float]:
        """Adds the scores to the samples, with greedy responses also baseline_rewards; returns the metrics of scoring."""
        metrics = dict(self.score_rows(samples.batch))
        if samples.greedy is not None:
            compared = self.score_rows(samples.greedy)
            metrics |= {name: value + metrics.get(name, 0.0) for name, value in compared.items() if name.startswith(COUNTS)}
            metrics |= add_baseline(samples.batch, samples.greedy)
        return metrics

    def score_rows(self, batch: DataProto) -> dict[str, float]:
        """Adds token_level_scores (rows, response), scores (rows,) and valid (rows,), and returns the metrics.

        Rows that come with their scores keep them: those of workflows that give rewards themselves, and recorded batches.
        Raises RewardError when more rows fail than the limit allows.
        """
        columns = batch.batch
        if "token_level_scores" in columns.keys():
            return {}
        with self.timers.measure("reward"):
            result = self.reward(batch)
        columns["token_level_scores"] = result.token_level_scores
        columns["scores"] = result.scores
        columns["valid"] = result.valid
        if ADDED in columns.keys():
            add_rewards(columns)
        if self.components:
            for name in numeric_entries(result):
                columns[f"{COMPONENT}{name}"] = component(result, name)
        if self.metric is not None:
            result.scores = columns["scores"]
            columns[SIGNAL] = group_metric(result, self.metric)
        return result.metrics


def build_scorer(config: PPOConfig, reward: RewardManager, timers: PhaseTimer) -> Scorer:
    """Returns a scorer that keeps what the chosen estimator and the group filter read."""
    groups = config.algorithm.filter_groups
    return Scorer(
        reward=reward,
        timers=timers,
        components=requirements(config).reward_components,
        metric=groups.metric if groups.enable else None,
    )


def add_baseline(batch: DataProto, greedy: DataProto) -> dict[str, float]:
    """Adds baseline_rewards (rows,): the reward of each prompt's greedy response (Li et al. 2024, arXiv 2310.10505); returns
    their mean as a metric.

    greedy: scored, one row a prompt, in the order in which `batch`, which is scored, has its samples side by side.  Where that
    response has no valid score there is nothing to compare with, and the prompt's samples do not train.
    """
    n = len(batch) // len(greedy)
    scores, valid = greedy.batch["scores"], greedy.batch["valid"]
    batch.batch["baseline_rewards"] = scores.repeat_interleave(n)
    batch.batch["valid"] = batch.batch["valid"] & valid.repeat_interleave(n)
    return {"reward/greedy_mean": scores[valid].double().mean().item()} if bool(valid.any()) else {}


def merge_scorings(scorings: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the metrics of several scorings of equal size: counts add up, the rest is averaged over those that have it."""
    names = dict.fromkeys(name for metrics in scorings for name in metrics)
    values = {name: [metrics[name] for metrics in scorings if name in metrics] for name in names}
    return {name: sum(found) if name.startswith(COUNTS) else sum(found) / len(found) for name, found in values.items()}


def numeric_entries(result: RewardResult) -> list[str]:
    """Returns the names of the extras that are numbers in every row that has them."""
    return [
        name
        for name, column in result.extra.items()
        if all(value is None or isinstance(value, bool | int | float | np.number) for value in column)
    ]


def component(result: RewardResult, name: str) -> Tensor:
    """Returns that number of each row, (rows,) float64; 0 for a row whose scoring failed, which has no entry at all.

    Raises RewardError for a row that was scored and has none, or one that is not finite: whatever stood in for it would be
    learned.
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
    """Returns the number of each row by which algorithm.filter_groups compares, (rows,) float64.

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
