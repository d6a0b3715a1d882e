"""Which workflow runs rows that name none, and what it is set to: from the configuration, before anything heavy is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from rlhub.config.rollout import MultiTurnConfig, RolloutConfig
from rlhub.registry import knobs_for
from rlhub.workflows.registry import DEFAULT, DEFAULT_MULTI_TURN

K = TypeVar("K")
WHERE = "actor_rollout_ref.rollout.agent.kwargs"


def default_workflow(rollout: RolloutConfig) -> str:
    """Of rows that name none."""
    return rollout.agent.default_agent_loop or (DEFAULT_MULTI_TURN if rollout.multi_turn.enable else DEFAULT)


def workflow_kwargs(rollout: RolloutConfig) -> dict[str, Any]:
    """A workflow's own settings: agent.kwargs, which win, and what the user set in multi_turn."""
    shared = {item.name: getattr(rollout.multi_turn, item.name) for item in dataclasses.fields(rollout.multi_turn)}
    shared.pop("enable")
    return {name: value for name, value in shared.items() if value is not None} | rollout.agent.kwargs


def fill_knobs(cls: type[K], kwargs: Mapping[str, Any]) -> K:
    """A workflow's own settings from the parts' kwargs.  ConfigError names what does not fit.

    Settings of rollout.multi_turn may be among the kwargs, whether or not this workflow has a use for them.
    """
    foreign = {name for name in MultiTurnConfig.__dataclass_fields__ if name not in cls.__dataclass_fields__}  # type: ignore[attr-defined]
    own = {name: value for name, value in kwargs.items() if name not in foreign}
    found = knobs_for(cls, cls(), own, where=WHERE)
    assert found is not None
    return found
