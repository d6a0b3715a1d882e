"""Which workflows exist.  Importing this module loads none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhub.registry import Registry

if TYPE_CHECKING:
    from rlhub.agents.workflows.base import RolloutWorkflow, WorkflowParts

WorkflowFactory = Callable[["WorkflowParts"], "RolloutWorkflow"]

WORKFLOWS: Registry[WorkflowFactory] = Registry("workflow")
"""`knobs`: the dataclass of the workflow's own settings (actor_rollout_ref.rollout.agent.kwargs)."""
WORKFLOWS.add_lazy("single_turn", "rlhub.agents.workflows.single_turn:SingleTurn")
WORKFLOWS.add_lazy("single_turn_agent", "rlhub.agents.workflows.single_turn:SingleTurn")  # its name in others' data and commands
WORKFLOWS.add_lazy("tool_agent", "rlhub.agents.workflows.tool_agent:ToolAgent", knobs="rlhub.agents.workflows.knobs:ToolKnobs")
WORKFLOWS.add_lazy(
    "multi_turn", "rlhub.agents.workflows.multi_turn:MultiTurn", knobs="rlhub.agents.workflows.knobs:MultiTurnKnobs"
)
WORKFLOWS.add_lazy(
    "environment", "rlhub.agents.workflows.environment:EnvironmentEpisodes", knobs="rlhub.agents.workflows.knobs:EnvironmentKnobs"
)
WORKFLOWS.add_lazy(
    "openai_agent", "rlhub.agents.workflows.openai_agent:OpenAIAgent", knobs="rlhub.agents.openai_server.knobs:AgentKnobs"
)

DEFAULT, DEFAULT_MULTI_TURN = "single_turn", "tool_agent"
"""Where neither the row nor the configuration names one: without and with rollout.multi_turn.enable."""
