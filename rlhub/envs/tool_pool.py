"""ToolPool: tool environments in processes, leased to episodes one at a time.

A call that hangs there is ended, with all that it has started: its process is killed.  That costs the one episode, whose
state is lost; the next lease gets a fresh process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rlhub.envs.base import Environment
from rlhub.envs.pool import EnvironmentPool, PoolLimits
from rlhub.envs.process import EnvProcess
from rlhub.envs.tool_child import TIMED_OUT
from rlhub.utils.tool_calls import ToolResult, ToolSchema


class PooledTools(Environment):
    """A leased tool environment.  EnvDiedError and DeadlineError: its process is gone, and the episode with it.

    A call that its caller gives up costs the process too: nobody knows where it stands.
    """

    def __init__(self, process: EnvProcess, limits: PoolLimits) -> None:
        self._process, self._limits = process, limits

    async def ainitialize(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        arguments = {"seed": seed, "options": None if options is None else dict(options)}
        await self._process.call("ainitialize", arguments, self._limits.reset_timeout_s)

    async def list_tools(self) -> list[ToolSchema]:
        schemas: list[ToolSchema] = await self._process.call("list_tools", {}, self._limits.reset_timeout_s)
        return schemas

    async def aexecute(self, tool_name: str, tool_args: Mapping[str, Any]) -> ToolResult:
        arguments = {"tool_name": tool_name, "tool_args": dict(tool_args)}
        found = await self._process.call("aexecute", arguments, self._limits.step_timeout_s)
        if TIMED_OUT in found:
            raise TimeoutError(found[TIMED_OUT])
        return ToolResult(**found)

    async def aclose(self) -> None:
        """The next lease has another environment, in the same process where it still lives."""
        if not self._process.dead:
            await self._process.call("aclose", {}, self._limits.reset_timeout_s)


class ToolPool(EnvironmentPool):
    """As EnvironmentPool; the environments have no state that could be saved."""

    serve = "rlhub.envs.tool_child:serve"

    @asynccontextmanager
    async def lease_tools(self) -> AsyncIterator[PooledTools]:
        """An environment for one episode; waits while all processes are taken.  LoadError if it cannot be made."""
        number = await self._free.get()
        try:
            tools = PooledTools(await self._process(number), self._limits)
            try:
                yield tools
            finally:
                await tools.aclose()
        finally:
            self._free.put_nowait(number)
