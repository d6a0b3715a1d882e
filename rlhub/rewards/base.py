"""The interface of reward managers, their parts, the rewards that they return, and the policy for failed scores.

A manager that judges each row by the reward function alone works in two parts: the outcomes of rows, which are made wherever the
rows are (rows.py), and the rewards of a batch, which are made of its outcomes on the driver, over one number a row.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import numpy as np
from torch import Tensor

from rlhub.errors import RewardError
from rlhub.protocol import Batch, DataProto
from rlhub.rewards.pool import RewardOutcome, RewardPool
from rlhub.rewards.rows import Decoder, rows_here

logger = logging.getLogger(__name__)
MAX_EXAMPLES = 3  # in the report of failures
FAILED = "reward/num_failed"
"""Metric: samples whose scoring failed; FAILED/<kind>: those of a kind."""
FAILED_SHARE = "reward/failed_share"
OUTCOMES = "reward_outcome"
"""Object column with the RewardOutcome of rows that were scored before the batch, and None for other rows."""


@dataclass(slots=True, kw_only=True)
class RewardResult:
    """The rewards of a batch.

    scores: (B,) float32, the rewards themselves.
    valid: (B,) bool; False: scoring failed and the sample must not train.
    extra: further entries of each row by the reward function and the manager, (B,) float64, or objects with None where a row has
    no such entry; "acc", where given, is the correctness that validation reports.
    metrics: reward/num_failed, reward/failed_share, and means of the numeric extras under the names of `managers.metric_of`.
    token_level_scores: (B, T) float32; None: each score is on the last token that the model wrote, and other tokens have 0.
    """

    scores: Tensor
    valid: Tensor
    extra: dict[str, np.ndarray]
    metrics: dict[str, float]
    token_level_scores: Tensor | None = None


class RewardManager(Protocol):
    """Turns a rollout batch into rewards.  Lives in the driver, called by one thread at a time."""

    def __call__(self, batch: DataProto) -> RewardResult:
        """Scores all rows.  Blocking.  Raises RewardError when failures exceed what the policy allows."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


@runtime_checkable
class BackgroundManager(RewardManager, Protocol):
    """A manager that reads no column of tokens on the driver, and scores while the driver does something else."""

    def start(self, batch: Batch) -> Callable[[], RewardResult]:
        """Begins to score all rows and returns without blocking; what it returns blocks until the rewards are there."""
        ...


@runtime_checkable
class RowManager(Protocol):
    """A RewardManager that may need nothing but the outcomes of the rows."""

    @property
    def scores_rows(self) -> bool:
        """Returns whether the outcomes of the rows are all that it reads of a batch."""
        ...


def needs_tokens(manager: RewardManager, batch: Batch) -> bool:
    """Returns whether a manager that can only be called reads the tokens of a batch: not where its rows were scored before."""
    ahead = batch.non_tensor_batch.get(OUTCOMES)
    scored = ahead is not None and all(outcome is not None for outcome in ahead)
    return not (scored and isinstance(manager, RowManager) and manager.scores_rows)


def start_scoring(manager: RewardManager, batch: Batch) -> Callable[[], RewardResult]:
    """Begins to score a batch, and returns what waits for the rewards.

    For a manager that can only be called, the rows are brought to the driver where it reads their tokens, and it is called when
    the rewards are asked for.
    """
    if isinstance(manager, BackgroundManager):
        return manager.start(batch)
    rows = rows_here(batch) if needs_tokens(manager, batch) else cast("DataProto", batch)  # it reads numbers alone
    return lambda: manager(rows)


@dataclass(slots=True, kw_only=True)
class ManagerParts:
    """The parts of every manager: reward_model's settings, ready to use.

    max_response_length: in tokens; max_error_rate: share of failed rows of a batch that on_error mask or zero may pass over.
    """

    pool: RewardPool
    tokenizer: Decoder
    max_response_length: int
    on_error: Literal["fail", "mask", "zero"]
    max_error_rate: float


def max_failures(num_rows: int, *, on_error: Literal["fail", "mask", "zero"], max_error_rate: float) -> int:
    """Returns the number of failures among `num_rows` samples that the policy tolerates."""
    return 0 if on_error == "fail" else int(max_error_rate * num_rows)


@dataclass(slots=True, kw_only=True, frozen=True)
class ScoredRows:
    """The outcomes of a batch's rows, with what the driver knows of each row.

    lengths: (B,) int64, tokens of the response; sources: (B,) objects, the data_source.
    """

    outcomes: Sequence[RewardOutcome]
    lengths: np.ndarray
    sources: np.ndarray

    @classmethod
    def of(cls, batch: Batch, outcomes: Sequence[RewardOutcome]) -> ScoredRows:
        """Returns the outcomes of all rows of a batch with their lengths and sources."""
        lengths = batch.batch["response_length"].numpy()
        return cls(outcomes=outcomes, lengths=lengths, sources=batch.non_tensor_batch["data_source"])


def check_failures(rows: ScoredRows, *, on_error: Literal["fail", "mask", "zero"], max_error_rate: float) -> dict[str, float]:
    """Returns metrics of the failures.  Raises RewardError if `on_error` or `max_error_rate` does not tolerate them."""
    outcomes = rows.outcomes
    kinds: Counter[str] = Counter(outcome.error.kind for outcome in outcomes if outcome.error is not None)
    num_skipped = kinds.pop("skipped", 0)
    num_failed = sum(kinds.values())
    share = num_failed / max(len(outcomes), 1)
    if num_failed:
        report = _report(rows, kinds)
        if on_error == "fail":
            raise RewardError(
                f"{report}\nThe run stops because reward_model.on_error=fail; mask and zero go on without such samples."
            )
        if share > max_error_rate or num_skipped:
            compared = (
                f"{num_failed} of {len(outcomes)} = {share:.0%} is more than reward_model.max_error_rate={max_error_rate:g}"
            )
            rest = f" The other {num_skipped} were not scored." if num_skipped else ""
            raise RewardError(f"{report}\n{compared} allows.{rest}")
        logger.warning("%s", report)
    return {
        FAILED: float(num_failed),
        FAILED_SHARE: share,
        **{f"{FAILED}/{kind}": float(count) for kind, count in sorted(kinds.items())},
    }


def _report(rows: ScoredRows, kinds: Counter[str]) -> str:
    """Returns counts by kind, and one example each of the first few kinds."""
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = [f"scoring failed for {sum(kinds.values())} of {len(rows.outcomes)} samples ({counts})"]
    for kind in list(kinds)[:MAX_EXAMPLES]:
        row, error = next((i, o.error) for i, o in enumerate(rows.outcomes) if o.error is not None and o.error.kind == kind)
        lines.append(f"row {row}, data_source {rows.sources[row]!r}, {rows.lengths[row]} tokens: {kind}: {error.message}")
    return "\n".join(lines)
