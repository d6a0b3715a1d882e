"""Scores of responses: reward functions in killable children, and the managers that turn scores into rewards.

The names below load on first use, because the children import the scorers of this package and must not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhub.rewards.base import ManagerParts, RewardManager, RewardResult
    from rlhub.rewards.build import build_reward_manager
    from rlhub.rewards.pool import RewardFailure, RewardOutcome, RewardPool, RewardRequest

_HOMES = {
    "ManagerParts": "base",
    "RewardManager": "base",
    "RewardResult": "base",
    "build_reward_manager": "build",
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
