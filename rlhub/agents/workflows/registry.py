"""Which workflows exist, which of them runs rows that name none, and the way from a name, registered or by path, to the workflow.

Importing this module loads no workflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlhub.config.sections.rollout import MultiTurnConfig, RolloutConfig
from rlhub.errors import ConfigError, LoadError
from rlhub.registry import Registry, knobs_for
from rlhub.utils.user_code import load_target

WorkflowFactory = Callable[..., Any]
"""Makes a RolloutWorkflow from WorkflowParts; its types are not named here, for they load an engine's interface."""

WORKFLOWS: Registry[WorkflowFactory] = Registry("workflow")
"""`knobs`: the dataclass of the workflow's own settings (actor_rollout_ref.rollout.agent.kwargs)."""
WORKFLOWS.add_lazy("single_turn", "rlhub.agents.workflows.turns:SingleTurn")
WORKFLOWS.add_lazy("single_turn_agent", "rlhub.agents.workflows.turns:SingleTurn")  # its name in others' data and commands
WORKFLOWS.add_lazy("tool_agent", "rlhub.agents.workflows.tool_agent:ToolAgent", knobs="rlhub.agents.workflows.knobs:ToolKnobs")
WORKFLOWS.add_lazy("multi_turn", "rlhub.agents.workflows.turns:MultiTurn", knobs="rlhub.agents.workflows.knobs:MultiTurnKnobs")
WORKFLOWS.add_lazy(
    "environment", "rlhub.agents.workflows.environment:EnvironmentEpisodes", knobs="rlhub.agents.workflows.knobs:EnvironmentKnobs"
)
WORKFLOWS.add_lazy(
    "openai_agent", "rlhub.agents.workflows.openai_agent:OpenAIAgent", knobs="rlhub.agents.workflows.knobs:AgentKnobs"
)

DEFAULT, DEFAULT_MULTI_TURN = "single_turn", "tool_agent"
"""Where neither the row nor the configuration names one: without and with rollout.multi_turn.enable."""

K = TypeVar("K")
WHERE = "actor_rollout_ref.rollout.agent.kwargs"


def default_workflow(rollout: RolloutConfig) -> str:
    """Returns the name of the workflow that runs rows which name none."""
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


def workflow_class(name: str) -> WorkflowFactory:
    """`name`: registered, `module:ClassName` or `path/to/file.py:ClassName`.  RegistryError or ConfigError if there is none."""
    if ":" not in name:
        return WORKFLOWS.get(name)
    try:
        found = load_target(name)
    except LoadError as error:
        raise ConfigError(f"workflow {error}") from error
    if not callable(found):
        raise ConfigError(f"workflow {name}: a {type(found).__name__}; expected a subclass of RolloutWorkflow, or what makes one")
    return found  # type: ignore[no-any-return]
