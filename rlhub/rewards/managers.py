"""The reward managers naive and dapo, and the function that builds the configured one.

naive gives a response its score.  dapo subtracts DAPO's soft penalty for overlong responses from it (Yu et al. 2025, arXiv
2503.14476, section 3.4).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhub.config.sections.reward import CustomRewardConfig, RewardModelConfig
from rlhub.errors import ConfigError, LoadError, RewardError
from rlhub.protocol import DataProto
from rlhub.registry import knobs_for, suggest
from rlhub.rewards.base import (
    OUTCOMES,
    ManagerParts,
    RewardManager,
    RewardResult,
    ScoredRows,
    check_failures,
    max_failures,
)
from rlhub.rewards.pool import LARGEST_SCORE, RewardFunction, RewardOutcome
from rlhub.rewards.registry import REWARD_MANAGERS
from rlhub.rewards.rows import Decoder, score_rows

NUMBERS = (bool, int, float)
OWN_METRICS = ("num_failed", "failed_share", "mean", "std", "greedy_mean", "function", "model", "judge", "judge_unreadable_share")
"""Names of the metrics reward/<name> that a run reports itself."""
CORRECT_ABOVE = 0.5  # between the wrong and right of both usual scales, 0 to 1 and -1 to 1
DEFAULT_TARGET = "rlhub.rewards.registry:compute_score"


def build_reward_manager(
    reward_model: RewardModelConfig,
    custom: CustomRewardConfig,
    tokenizer: Decoder,
    max_response_length: int,
    sources: Mapping[str, str] | None = None,
) -> RewardManager:
    """Builds the configured manager.  Starts a child process and loads the reward function in it; `close()` ends it.

    sources: the functions of data sources that have their own, which a process loads with their first row.
    Raises ConfigError for an unknown manager or knob and for a function that cannot be loaded.
    """
    name = reward_model.reward_manager
    where = "reward_model.reward_kwargs"
    knobs = knobs_for(REWARD_MANAGERS.knobs_class(name), reward_model, reward_model.reward_kwargs, where=where)
    pool = reward_function(reward_model, custom, sources).pool()
    parts = ManagerParts(
        pool=pool,
        tokenizer=tokenizer,
        max_response_length=max_response_length,
        on_error=reward_model.on_error,
        max_error_rate=reward_model.max_error_rate,
    )
    try:
        manager: RewardManager = REWARD_MANAGERS.get(name)(parts, knobs)
        pool.start()
    except ConfigError:  # the pool's, which names its setting
        raise
    except LoadError as error:
        raise ConfigError(f"custom_reward_function: {error}" if custom.path else str(error)) from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    return manager


def reward_function(
    reward_model: RewardModelConfig, custom: CustomRewardConfig, sources: Mapping[str, str] | None = None
) -> RewardFunction:
    """Returns the configured function with the limits of its processes.  Raises ConfigError where its file does not exist.

    sources: the functions of data sources that have their own.
    """
    return RewardFunction(
        target=reward_target(custom),
        sources=sources or {},
        num_workers=reward_model.num_workers,
        timeout_s=reward_model.timeout_s,
        memory_gb=reward_model.memory_gb,
        env=tuple(custom.env),
    )


def reward_target(custom: CustomRewardConfig) -> str:
    """Returns the function's name for the pool; a relative path is relative to the working directory.

    Raises ConfigError where the file does not exist.
    """
    if custom.path is None:
        return DEFAULT_TARGET
    path = Path(custom.path).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"custom_reward_function.path={custom.path}: no such file ({path})")
    return f"{path}:{custom.name}"


class NaiveManager:
    """Makes the rewards of a batch of the reward function's outcomes, and applies the policy for failures.

    Subclasses change scores in `adjust`, or all that is made of the outcomes in `reward`.  Both read one number a row, so the
    rows themselves may be scored where they are; a subclass that has a `__call__` of its own is given the rows.
    """

    def __init__(self, parts: ManagerParts, knobs: Any = None) -> None:
        self.parts, self.knobs = parts, knobs

    def __call__(self, batch: DataProto) -> RewardResult:
        """Scores the rows here, those that OUTCOMES does not have yet."""
        return self.reward(ScoredRows.of(batch, self._outcomes(batch)))

    @property
    def scores_rows(self) -> bool:
        """Returns whether the outcomes of the rows are all that this manager reads of a batch."""
        return type(self).__call__ is NaiveManager.__call__

    def reward(self, rows: ScoredRows) -> RewardResult:
        """Returns the rewards of a batch.  Raises RewardError where more rows failed than the policy allows."""
        parts, outcomes = self.parts, rows.outcomes
        metrics = check_failures(rows, on_error=parts.on_error, max_error_rate=parts.max_error_rate)
        scored = np.array([outcome.error is None for outcome in outcomes], dtype=bool)
        raw = np.array([outcome.score for outcome in outcomes], dtype=np.float32)
        adjusted, added = self.adjust(raw, rows.lengths)
        extra = added | collect_details(outcomes)
        return RewardResult(
            scores=as_rewards(np.where(scored, adjusted, 0)),
            valid=torch.from_numpy(scored) if parts.on_error == "mask" else torch.ones(len(outcomes), dtype=torch.bool),
            extra=extra,
            metrics=metrics | {metric_of(name): mean for name, mean in numeric_means(extra).items()},
        )

    def _outcomes(self, batch: DataProto) -> list[RewardOutcome]:
        """Returns the outcome of every row; only rows without one in OUTCOMES are decoded and sent to the pool."""
        parts = self.parts
        ahead = batch.non_tensor_batch.get(OUTCOMES)
        known: list[RewardOutcome | None] = [None] * len(batch) if ahead is None else list(ahead)
        missing = [row for row, outcome in enumerate(known) if outcome is None]
        scored: Iterator[RewardOutcome] = iter(())
        if missing:
            scored = iter(score_rows(batch, parts.tokenizer, parts.pool, self.max_failures(len(known)), missing))
        return [next(scored) if outcome is None else outcome for outcome in known]

    def max_failures(self, num_rows: int) -> int:
        """Returns the number of failures among so many rows that the policy tolerates."""
        return max_failures(num_rows, on_error=self.parts.on_error, max_error_rate=self.parts.max_error_rate)

    def lenient(self) -> NaiveManager:
        """Returns a manager of the same scores for which every failure is a sample without a valid score."""
        return type(self)(dataclasses.replace(self.parts, on_error="mask", max_error_rate=1.0), self.knobs)

    def adjust(self, scores: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns rewards (B,) and further entries of `extra` for scores (B,) float32 and response lengths (B,) in tokens."""
        return scores, {}

    def close(self) -> None:
        self.parts.pool.close()


def as_rewards(values: np.ndarray) -> Tensor:
    """Returns rewards (B,) as float32.  Raises RewardError, which names the row, for one that float32 cannot hold."""
    too_large = ~(np.abs(values) <= LARGEST_SCORE)
    if too_large.any():
        row = int(too_large.argmax())
        raise RewardError(
            f"row {row}: its reward is {values[row]:g}, which is beyond float32. Scale the scores down, or lower the factors "
            "reward_model.function_weight, reward_model.weight and reward_model.judge.weight or the penalties in "
            "reward_model.reward_kwargs"
        )
    return torch.from_numpy(values.astype(np.float32))


def metric_of(name: str) -> str:
    """Returns the name of the metric for a further number that the reward function returns.

    It is reward/<name>, or reward/details/<name> where the run reports a metric of its own under that name.
    """
    taken = name in OWN_METRICS or name.split("/")[0] in OWN_METRICS
    return f"reward/details/{name}" if taken else f"reward/{name}"


def collect_details(outcomes: Sequence[RewardOutcome]) -> dict[str, np.ndarray]:
    """Returns the rows' details as columns (B,): float64 if every row has a number, else objects with None for a row without."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.details)
    return {name: _column([outcome.details.get(name) for outcome in outcomes]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    if all(isinstance(value, NUMBERS) for value in values):
        return np.array(values, dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def numeric_means(extra: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the means of the columns that hold only numbers, each over the rows with a finite number."""
    means = {}
    for name, column in extra.items():
        numbers = [float(value) for value in column if isinstance(value, NUMBERS) and np.isfinite(value)]
        if numbers and all(value is None or isinstance(value, NUMBERS) for value in column):
            means[name] = math.fsum(number / len(numbers) for number in numbers)  # the sum may be beyond float64
    return means


@dataclass(slots=True, kw_only=True)
class OverlongBuffer:
    """The last `len` tokens before the response limit, over which the penalty grows from 0 to `penalty_factor`.

    len: tokens, above 0 and at most data.max_response_length; penalty_factor: in units of the score.
    """

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.enable and self.len < 1:
            raise ValueError(f"overlong_buffer_cfg.len must be at least 1 token, got {self.len!r}")
        if self.penalty_factor < 0:
            raise ValueError(f"overlong_buffer_cfg.penalty_factor must be 0 or more, got {self.penalty_factor!r}")


@dataclass(slots=True, kw_only=True)
class DapoKnobs:
    """Knobs of the manager dapo.  overlong_buffer_cfg: a mapping of OverlongBuffer's fields in a configuration."""

    overlong_buffer_cfg: OverlongBuffer = field(default_factory=OverlongBuffer)

    def __post_init__(self) -> None:
        given: Any = self.overlong_buffer_cfg
        if isinstance(given, OverlongBuffer):
            return
        if not isinstance(given, Mapping):
            raise ValueError(f"overlong_buffer_cfg must be a mapping with enable, len, penalty_factor; got {given!r}")
        known = [item.name for item in dataclasses.fields(OverlongBuffer)]
        for name in given:
            if name not in known:
                raise ValueError(
                    f"overlong_buffer_cfg.{name}: no such knob{suggest(str(name), known)}; known: {', '.join(known)}"
                )
        self.overlong_buffer_cfg = OverlongBuffer(**given)


class DapoManager(NaiveManager):
    """Subtracts the overlong penalty from the score.

    It adds to `extra`: overlong_reward (0 or less), overlong (0 or 1) and, unless the scorer returns its own, acc, which is 1
    where the score without the penalty exceeds 0.5, so that validation still counts a right but long answer as right.
    """

    def __init__(self, parts: ManagerParts, knobs: DapoKnobs) -> None:
        super().__init__(parts, knobs)
        self.buffer = knobs.overlong_buffer_cfg
        if self.buffer.enable and self.buffer.len > parts.max_response_length:
            raise ValueError(
                f"overlong_buffer_cfg.len={self.buffer.len} exceeds data.max_response_length={parts.max_response_length}: "
                "every response would be penalised"
            )

    def adjust(self, scores: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if not self.buffer.enable:
            return scores, {}
        penalty = overlong_penalty(lengths, limit=self.parts.max_response_length, buffer=self.buffer)
        acc = (scores > CORRECT_ABOVE).astype(np.float64)
        return scores + penalty, {"acc": acc, "overlong_reward": penalty, "overlong": (penalty < 0).astype(np.float64)}


def overlong_penalty(lengths: np.ndarray, *, limit: int, buffer: OverlongBuffer) -> np.ndarray:
    """Returns min(0, (limit - len_b - |y|) / len_b) * factor, (B,) float64: 0 up to limit - len_b tokens, -factor at the limit.

    lengths: (B,) tokens |y|; limit: data.max_response_length.
    """
    over = lengths.astype(np.float64) - (limit - buffer.len)
    return np.clip(-over / buffer.len, -1.0, 0.0) * buffer.penalty_factor
