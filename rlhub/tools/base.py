"""Tool: something a model may call in an episode.  ToolSource: tools that are known only once something has been started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlhub.errors import RlhubError
from rlhub.utils.tool_calls import ToolResult, ToolSchema


class ToolError(RlhubError, ValueError):
    """A call that cannot be done.  Raised in `execute` the message goes to the model; elsewhere it is the user's."""


class Tool(ABC):
    """One instance serves many episodes at once; `instance` names the episode.  All methods run on one event loop.

    An episode that calls the tool creates its instance before the first call and releases it at the end, however the episode
    ends.  Deadlines are the caller's: `execute` is cancelled when its time is up.
    """

    @property
    @abstractmethod
    def schema(self) -> ToolSchema:
        """The tool as chat templates describe it."""

    async def create(self, instance: str, row: Mapping[str, Any]) -> None:  # noqa: B027  most tools keep nothing
        """An episode on the prompt `row` is about to call for the first time."""

    @abstractmethod
    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        """One call; the arguments fit the schema.  ToolError: its message is what the model reads."""

    async def release(self, instance: str) -> None:  # noqa: B027
        """The episode is over."""

    async def aclose(self) -> None:  # noqa: B027
        """Release what all episodes shared; no call is under way."""


class ToolSource(ABC):
    """For example a server that says itself which tools it has."""

    @abstractmethod
    async def aopen(self) -> Sequence[Tool]:
        """Start, and say which tools there are.  Called once, on the event loop of the episodes."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop.  Idempotent."""
