"""The registry of workflows, the default for rows that name none, and the lookup by registered name or path.

Importing this module loads no workflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from rlhub.config.sections.rollout import MultiTurnConfig, RolloutConfig
from rlhub.errors import ConfigError, LoadError
from rlhub.registry import Registry, knobs_for
from rlhub.utils.user_code import load_target

WorkflowFactory = Callable[..., Any]
"""Builds a RolloutWorkflow from WorkflowParts.  The types are not named here because they would load an engine's interface."""

WORKFLOWS: Registry[WorkflowFactory] = Registry("workflow")
"""A row's `knobs` is the dataclass of the workflow's own settings (actor_rollout_ref.rollout.agent.kwargs)."""
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
WORKFLOWS.add_lazy(
    "verifiers:",
    "rlhub.agents.verifiers.workflow:VerifiersEpisodes",
    knobs="rlhub.agents.workflows.knobs:VerifiersKnobs",
    companions={"problems": "rlhub.agents.verifiers.process:environment_problems"},
)
WORKFLOWS.add_lazy("online", "rlhub.agents.workflows.online:OnlineEpisodes", knobs="rlhub.agents.workflows.knobs:OnlineKnobs")

DEFAULT, DEFAULT_MULTI_TURN = "single_turn", "tool_agent"
"""The workflows of rows that name none if the configuration names none either: without and with rollout.multi_turn.enable."""

K = TypeVar("K")
WHERE = "actor_rollout_ref.rollout.agent.kwargs"


def default_workflow(rollout: RolloutConfig) -> str:
    """Returns the name of the workflow that runs rows which name none."""
    return rollout.agent.default_agent_loop or (DEFAULT_MULTI_TURN if rollout.multi_turn.enable else DEFAULT)


def workflow_kwargs(rollout: RolloutConfig) -> dict[str, Any]:
    """Returns the settings of a workflow: those of agent.kwargs, and for all others those that the user set in multi_turn."""
    shared = {item.name: getattr(rollout.multi_turn, item.name) for item in dataclasses.fields(rollout.multi_turn)}
    shared.pop("enable")
    return {name: value for name, value in shared.items() if value is not None} | rollout.agent.kwargs


def fill_knobs(cls: type[K], kwargs: Mapping[str, Any]) -> K:
    """Returns the knobs of a workflow, filled from the parts' kwargs.  Raises ConfigError that names what does not fit.

    The kwargs may contain settings of rollout.multi_turn that this workflow does not have.
    """
    foreign = {name for name in MultiTurnConfig.__dataclass_fields__ if name not in cls.__dataclass_fields__}  # type: ignore[attr-defined]
    own = {name: value for name, value in kwargs.items() if name not in foreign}
    found = knobs_for(cls, cls(), own, where=WHERE)
    assert found is not None
    return found


def split_name(name: str) -> tuple[str, str]:
    """Returns the registered name and the target of a name such as verifiers:gsm8k; the target of other names is ""."""
    family, _, target = name.partition(":")
    return (f"{family}:", target) if f"{family}:" in WORKFLOWS else (name, "")


def workflow_class(name: str) -> WorkflowFactory:
    """Returns the class or function of a registered name, `module:ClassName` or `path/to/file.py:ClassName`.

    A registered name that ends with a colon takes the rest of `name` as its target.  Raises RegistryError or ConfigError if there
    is none.
    """
    registered, target = split_name(name)
    if target:
        return partial(WORKFLOWS.get(registered), target=target)
    if ":" not in name:
        return WORKFLOWS.get(name)
    try:
        found = load_target(name)
    except LoadError as error:
        raise ConfigError(f"workflow {error}") from error
    if not callable(found):
        raise ConfigError(f"workflow {name}: a {type(found).__name__}; expected a subclass of RolloutWorkflow, or what makes one")
    return found  # type: ignore[no-any-return]
