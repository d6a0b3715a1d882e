"""What becomes of samples whose scoring failed: counted, reported, masked or scored 0, or the end of the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from rlhub.errors import RewardError
from rlhub.rewards.pool import RewardOutcome, RewardRequest

logger = logging.getLogger(__name__)
SHOWN = 3
FAILED = "reward/num_failed"
"""Metric: samples whose scoring failed; FAILED/<kind>: those of a kind."""
FAILED_SHARE = "reward/failed_share"


def max_failures(num_rows: int, *, on_error: Literal["fail", "mask", "zero"], max_error_rate: float) -> int:
    """How many failures among `num_rows` samples the policy lets pass."""
    return 0 if on_error == "fail" else int(max_error_rate * num_rows)


def check_failures(
    request: Callable[[int], RewardRequest],
    outcomes: Sequence[RewardOutcome],
    *,
    on_error: Literal["fail", "mask", "zero"],
    max_error_rate: float,
) -> dict[str, float]:
    """Metrics of the failures; RewardError if `on_error` or `max_error_rate` does not let them pass.

    request: that of a row, asked for the few that a message shows.
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
    """Counts by kind, and one example each of the first few kinds."""
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = [f"scoring failed for {sum(kinds.values())} of {len(outcomes)} samples ({counts})"]
    for kind in list(kinds)[:SHOWN]:
        row, error = next((i, o.error) for i, o in enumerate(outcomes) if o.error is not None and o.error.kind == kind)
        shown = request(row)
        lines.append(
            f"row {row}, data_source {shown.data_source!r}, {len(shown.solution_str)} characters: {kind}: {error.message}"
        )
    return "\n".join(lines)
