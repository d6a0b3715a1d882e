"""Scores of responses: reward functions in killable processes, and the managers that turn scores into rewards.

base.py           the interface of managers, and the policy for failed scores
registry.py       the names of managers and scorers, and the scorer of each data source
rows.py           outcomes of rows: responses as texts, and the scoring of rows in the background
managers.py       the managers naive and dapo: the rewards of a batch out of its outcomes
combine.py        one reward out of a function, a reward model and a judge; the judge itself
judge_prompt.py   the judge's prompt, and the score in its answer
pool.py           scores from a function in killable processes
srpo.py           rewards of failed episodes by their distance to successes
answers.py        final answers in texts; the scorers gsm8k and exact
math.py           the scorer math
rendering.py      the texts of a batch in another model's tokens

The names below load on first use, because the killable processes import this package's scorers and must not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhub.rewards.base import ManagerParts, RewardManager, RewardResult
    from rlhub.rewards.managers import build_reward_manager
    from rlhub.rewards.pool import RewardFailure, RewardOutcome, RewardPool, RewardRequest

_MODULES = {
    "ManagerParts": "base",
    "RewardManager": "base",
    "RewardResult": "base",
    "build_reward_manager": "managers",
    "RewardFailure": "pool",
    "RewardOutcome": "pool",
    "RewardPool": "pool",
    "RewardRequest": "pool",
}
__all__ = [
    "ManagerParts",
    "RewardFailure",
    "RewardManager",
    "RewardOutcome",
    "RewardPool",
    "RewardRequest",
    "RewardResult",
    "build_reward_manager",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
