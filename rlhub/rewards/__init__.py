"""Scores of responses: reward functions in killable children, and the managers that turn scores into rewards.

base: the interface of managers, and the policy for failures.  registry: names of managers and scorers, and the scorer that a
row's data source chooses.  build: from configuration to a manager.  naive, dapo: managers.  combine: one reward out of a
function, a reward model and a judge.  pool: scores from a function in killable children.  gsm8k, math: scorers; answers is what
they read answers with. judge, judge_prompt: a language model as judge.  rendering: texts of a batch in another model's tokens.

The names below load on first use, because the children import the scorers of this package and must not load torch.
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
