"""Environments in another process or on another machine: the episode's side of calls by method name.

`remote_environment(call, offers_tools=...)` is an environment whose methods are such calls.  The pool's processes are called in
this way, and so are the actors that run environments (LeaseTable in source.py is their side).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlhub.envs.base import Environment, Observation, StepEnvironment, StepResult
from rlhub.utils.tool_calls import ToolResult, ToolSchema

Call = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""`await call(method, arguments)` calls a method of the environment by name, with keyword arguments."""

METHODS = frozenset({"reset", "step", "get_state", "load_state", "ainitialize", "list_tools", "aexecute"})


class RemoteSteps(StepEnvironment):
    """A step environment in another process."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        begun: tuple[Observation, dict[str, Any]] = await self._call("reset", _start(seed, options))
        return begun

    async def step(self, action: Any) -> StepResult:
        result: StepResult = await self._call("step", {"action": action})
        return result

    async def get_state(self) -> Any:
        return await self._call("get_state", {})

    async def load_state(self, state: Any) -> None:
        await self._call("load_state", {"state": state})

    async def close(self) -> None:
        """Does nothing: the lease ends with its context, and the simulator serves the next lease."""


class RemoteTools(Environment):
    """A tool environment in another process."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def ainitialize(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        await self._call("ainitialize", _start(seed, options))

    async def list_tools(self) -> list[ToolSchema]:
        schemas: list[ToolSchema] = await self._call("list_tools", {})
        return schemas

    async def aexecute(self, tool_name: str, tool_args: Mapping[str, Any]) -> ToolResult | str:
        result: ToolResult | str = await self._call("aexecute", {"tool_name": tool_name, "tool_args": dict(tool_args)})
        return result


def remote_environment(call: Call, *, offers_tools: bool) -> StepEnvironment | Environment:
    """Returns the environment that `call` reaches, with the interface that episodes use."""
    return RemoteTools(call) if offers_tools else RemoteSteps(call)


def _start(seed: int | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"seed": seed, "options": None if options is None else dict(options)}
