"""The names of reward managers and of the built-in scorers, and the scorer of each data source.

Importing this module loads neither torch nor a scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhub.registry import Registry, suggest

REWARD_MANAGERS: Registry[Callable[..., Any]] = Registry("reward manager")
"""Managers by name, `(parts: ManagerParts, knobs) -> RewardManager`; reward_model.reward_kwargs fills the row's knobs."""
REWARD_MANAGERS.add_lazy("naive", "rlhub.rewards.managers:NaiveManager")
REWARD_MANAGERS.add_lazy("dapo", "rlhub.rewards.managers:DapoManager", knobs="rlhub.rewards.managers:DapoKnobs")

SCORERS: Registry[Callable[..., Any]] = Registry("scorer")
"""Scorers by name, `compute_score(data_source, solution_str, ground_truth, extra_info) -> score`."""
SCORERS.add_lazy("gsm8k", "rlhub.rewards.answers:compute_score")
SCORERS.add_lazy("math", "rlhub.rewards.math:compute_score")
SCORERS.add_lazy("exact", "rlhub.rewards.answers:exact_match")

SOURCES = {
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "math": "math",
    "math_dapo": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "hendrycks/competition_math": "math",
    "HuggingFaceH4/MATH-500": "math",
    "HuggingFaceH4/aime_2024": "math",
    "exact": "exact",
}
"""The scorer of each data_source, for the names of the published data sets."""


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float | dict[str, Any]:
    """Returns the score by the data source's own scorer; it is the reward function of runs without `custom_reward_function.path`.

    Raises LookupError for a source without a scorer.
    """
    name = SOURCES.get(data_source)
    if name is None:
        raise LookupError(
            f"no reward function for data_source {data_source!r}{suggest(str(data_source), SOURCES)}; "
            f"known: {', '.join(sorted(SOURCES))}. Name your own with custom_reward_function.path=<file.py>"
        )
    return SCORERS.get(name)(data_source, solution_str, ground_truth, extra_info)  # type: ignore[no-any-return]
