"""Tool: a function that a model may call in an episode.  ToolSource: tools that are known only once a server has started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlhub.errors import RlhubError
from rlhub.utils.tool_calls import ToolResult, ToolSchema


class ToolError(RlhubError, ValueError):
    """A call that cannot be executed.  Raised in `execute`, its message goes to the model; raised anywhere else, to the user."""


class Tool(ABC):
    """One instance serves many episodes at once; `instance` names the episode.  All methods run on one event loop.

    An episode that calls the tool creates its instance before the first call and releases it at the end, however the episode
    ends.  Deadlines belong to the caller: it cancels `execute` when the time is up.
    """

    @property
    @abstractmethod
    def schema(self) -> ToolSchema:
        """Returns the schema by which chat templates describe the tool."""

    async def create(self, instance: str, row: Mapping[str, Any]) -> None:  # noqa: B027  most tools keep nothing
        """Prepares the tool for an episode on the prompt `row`, before its first call."""

    @abstractmethod
    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Executes one call; the arguments fit the schema.  The model reads the message of a ToolError."""

    async def release(self, instance: str) -> None:  # noqa: B027
        """Releases the instance of an episode that has ended."""

    async def aclose(self) -> None:  # noqa: B027
        """Releases what all episodes shared.  It is called when no call runs."""


class ToolSource(ABC):
    """Provides tools once it has started, for example a server that lists its own."""

    @abstractmethod
    async def aopen(self) -> Sequence[Tool]:
        """Starts the source and returns its tools.  It is called once, on the event loop of the episodes."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stops the source.  Idempotent."""
