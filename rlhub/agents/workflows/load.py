"""From a workflow's name, registered or by path, to the workflow."""

from __future__ import annotations

from rlhub.agents.workflows.base import RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.registry import WORKFLOWS, WorkflowFactory
from rlhub.agents.workflows.settings import WHERE, fill_knobs
from rlhub.errors import ConfigError, LoadError
from rlhub.utils.user_code import load_target

__all__ = ["WHERE", "build_workflow", "fill_knobs", "workflow_class"]


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
