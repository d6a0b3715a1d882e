"""From a workflow's name, registered or by path, to the workflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rlhub.algorithms.knobs import knobs_for
from rlhub.config.rollout import MultiTurnConfig
from rlhub.errors import ConfigError, LoadError
from rlhub.utils.user_code import load_target
from rlhub.workflows.base import RolloutWorkflow, WorkflowParts
from rlhub.workflows.registry import WORKFLOWS, WorkflowFactory

K = TypeVar("K")
WHERE = "actor_rollout_ref.rollout.agent.kwargs"


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


def build_workflow(name: str, parts: WorkflowParts) -> RolloutWorkflow:
    """The workflow of this name.  ConfigError for a name or setting that does not fit."""
    workflow = workflow_class(name)(parts)
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow {name}: made a {type(workflow).__name__}, which is no RolloutWorkflow")
    return workflow


def fill_knobs(cls: type[K], kwargs: Mapping[str, Any]) -> K:
    """A workflow's own settings from the parts' kwargs.  ConfigError names what does not fit.

    Settings of rollout.multi_turn may be among the kwargs, whether or not this workflow has a use for them.
    """
    foreign = {name for name in MultiTurnConfig.__dataclass_fields__ if name not in cls.__dataclass_fields__}  # type: ignore[attr-defined]
    own = {name: value for name, value in kwargs.items() if name not in foreign}
    found = knobs_for(cls, cls(), own, where=WHERE)
    assert found is not None
    return found
