"""The interface of reward managers, their parts, the rewards that they return, and the policy for failed scores."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.rewards.pool import RewardOutcome, RewardPool, RewardRequest

logger = logging.getLogger(__name__)
MAX_EXAMPLES = 3  # in the report of failures
FAILED = "reward/num_failed"
"""Metric: samples whose scoring failed; FAILED/<kind>: those of a kind."""
FAILED_SHARE = "reward/failed_share"


@dataclass(slots=True, kw_only=True)
class RewardResult:
    """The rewards of a batch.

    token_level_scores: (B, T) float32, the score on the last token that the model wrote, 0 on other tokens and in rows without
    such a token.
    scores: (B,) float32, the rewards themselves.
    valid: (B,) bool; False: scoring failed and the sample must not train.
    extra: further entries of each row by the reward function and the manager, (B,) float64, or objects with None where a row has
    no such entry; "acc", where given, is the correctness that validation reports.
    metrics: reward/num_failed, reward/failed_share, and means of the numeric extras under the names of `managers.metric_of`.
    """

    token_level_scores: Tensor
    scores: Tensor
    valid: Tensor
    extra: dict[str, np.ndarray]
    metrics: dict[str, float]


class RewardManager(Protocol):
    """Turns a rollout batch into rewards.  Lives in the driver, called by one thread at a time."""

    def __call__(self, batch: DataProto) -> RewardResult:
        """Scores all rows.  Blocking.  Raises RewardError when failures exceed what the policy allows."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


class Decoder(Protocol):
    """The part of a tokenizer that managers use."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]: ...


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


def check_failures(
    request: Callable[[int], RewardRequest],
    outcomes: Sequence[RewardOutcome],
    *,
    on_error: Literal["fail", "mask", "zero"],
    max_error_rate: float,
) -> dict[str, float]:
    """Returns metrics of the failures.  Raises RewardError if `on_error` or `max_error_rate` does not tolerate them.

    request: returns the request of a row; called for the few rows that a message shows.
    """
    kinds: Counter[str] = Counter(outcome.error.kind for outcome in outcomes if outcome.error is not None)
    num_skipped = kinds.pop("skipped", 0)
    num_failed = sum(kinds.values())
    share = num_failed / max(len(outcomes), 1)
    if num_failed:
        report = _report(request, outcomes, kinds)
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


def _report(request: Callable[[int], RewardRequest], outcomes: Sequence[RewardOutcome], kinds: Counter[str]) -> str:
    """Returns counts by kind, and one example each of the first few kinds."""
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = [f"scoring failed for {sum(kinds.values())} of {len(outcomes)} samples ({counts})"]
    for kind in list(kinds)[:MAX_EXAMPLES]:
        row, error = next((i, o.error) for i, o in enumerate(outcomes) if o.error is not None and o.error.kind == kind)
        shown = request(row)
        lines.append(
            f"row {row}, data_source {shown.data_source!r}, {len(shown.solution_str)} characters: {kind}: {error.message}"
        )
    return "\n".join(lines)
