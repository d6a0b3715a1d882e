"""The own settings of the workflows that come with rlhub (actor_rollout_ref.rollout.agent.kwargs); loads nothing heavy.

A knob with the name of a setting of actor_rollout_ref.rollout.multi_turn takes its value from there where kwargs has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhub.config.rollout import MultiTurnConfig


def at_least(least: float, **values: float | None) -> None:
    """ValueError for a value below `least`; None is no value."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < least):
            raise ValueError(f"{name}={value!r}: must be a number, at least {least:g}")


@dataclass(slots=True, kw_only=True)
class TurnKnobs:
    """What every workflow of several turns has."""

    max_assistant_turns: int | None = None
    """Most generations in an episode; None: until the response is full."""
    max_user_turns: int | None = None
    """Most answers of tools, users or environments in an episode; None: no limit of their own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    def __post_init__(self) -> None:
        at_least(1, max_assistant_turns=self.max_assistant_turns)
        at_least(0, max_user_turns=self.max_user_turns)

    def may_go_on(self, num_turns: int) -> bool:
        """Whether another answer to the policy, and another turn of it, may follow after `num_turns` of its turns."""
        turns, answers = self.max_assistant_turns, self.max_user_turns
        return (turns is None or num_turns < turns) and (answers is None or num_turns <= answers)


@dataclass(slots=True, kw_only=True)
class ToolKnobs(TurnKnobs):
    """How tools are called."""

    tool_config_path: str | None = None
    """YAML file that lists the tools."""
    tools: list[Any] = field(default_factory=list)
    """Further tools, as entries of that file."""
    format: str = field(default_factory=lambda: MultiTurnConfig().format)
    """How calls stand in the text; a registered format."""
    tool_timeout_s: float = 30.0
    """Seconds for one call; after that the model reads that it was not done."""
    max_tool_response_length: int = 2000
    """Most characters of one result; the middle of longer ones is left out."""
    max_parallel_calls: int = 4
    """Most calls done of one turn; the model is told of the others."""

    def __post_init__(self) -> None:
        super(ToolKnobs, self).__post_init__()
        at_least(1, max_tool_response_length=self.max_tool_response_length, max_parallel_calls=self.max_parallel_calls)
        at_least(0.001, tool_timeout_s=self.tool_timeout_s)
