"""The scorer used without `custom_reward_function.path`: chosen by each row's data_source."""

from __future__ import annotations

from typing import Any

from rlhub.registry import suggest
from rlhub.rewards.registry import SCORERS, SOURCES


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float | dict[str, Any]:
    """The score by the data source's own scorer.  LookupError for a source that has none."""
    name = SOURCES.get(data_source)
    if name is None:
        raise LookupError(
            f"no reward function for data_source {data_source!r}{suggest(str(data_source), SOURCES)}; "
            f"known: {', '.join(sorted(SOURCES))}. Name your own with custom_reward_function.path=<file.py>"
        )
    return SCORERS.get(name)(data_source, solution_str, ground_truth, extra_info)  # type: ignore[no-any-return]
