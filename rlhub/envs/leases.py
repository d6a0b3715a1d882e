"""Environments used from afar: the table of those that are lent, where they are, and what stands for them where they are used.

    table: `open`, `call` by method name, `release`        (an actor's side)
    stand_in(spec, call): an environment whose methods are such calls        (the episode's side)

What travels are the arguments and results as they are, pictures as arrays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from rlhub.envs.base import EnvDiedError, Environment, Observation, StepEnvironment, StepResult
from rlhub.envs.source import EnvironmentSource, EnvironmentSpec
from rlhub.utils.tool_calls import ToolResult, ToolSchema

Call = Callable[..., Awaitable[Any]]
"""`await call(method, arguments)`: a method of the environment, by name, with keyword arguments."""

METHODS = frozenset({"reset", "step", "get_state", "load_state", "ainitialize", "list_tools", "aexecute"})


class _Lent:
    """One environment, the lease it is held by, and the turns of its calls."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.one_at_a_time = asyncio.Lock()
        self.environment: Any = None


class LeaseTable:
    """Environments of a source by the numbers of their leases, which their users choose.  Belongs to one event loop."""

    def __init__(self, source: EnvironmentSource) -> None:
        self._source = source
        self._lent: dict[int, _Lent] = {}
        self.calls = 0

    def __len__(self) -> int:
        return len(self._lent)

    async def open(self, lease: int, spec: EnvironmentSpec, session: str) -> None:
        """Lease an environment; waits while all are taken."""
        lent = _Lent()
        lent.environment = await lent.stack.enter_async_context(self._source.lease(spec, session))
        self._lent[lease] = lent

    async def call(self, lease: int, method: str, arguments: Mapping[str, Any]) -> Any:
        """A method of a leased environment, after those that were called before.  EnvDiedError: there is no such lease."""
        if method not in METHODS:
            raise ValueError(f"environments have no method {method!r}; known: {', '.join(sorted(METHODS))}")
        lent = self._lent.get(lease)
        if lent is None:
            raise EnvDiedError(f"{method}: the environment is not lent any more")
        async with lent.one_at_a_time:
            self.calls += 1
            return await getattr(lent.environment, method)(**arguments)

    async def release(self, lease: int) -> None:
        """Give an environment back, after the call under way.  One that is not lent is passed over."""
        lent = self._lent.get(lease)
        if lent is not None:
            async with lent.one_at_a_time:
                if self._lent.pop(lease, None) is not None:
                    await lent.stack.aclose()

    async def release_all(self) -> None:
        """Give all back."""
        await asyncio.gather(*(self.release(lease) for lease in list(self._lent)), return_exceptions=True)


class RemoteSteps(StepEnvironment):
    """A step environment elsewhere."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        begun: tuple[Observation, dict[str, Any]] = await self._call("reset", {"seed": seed, "options": options})
        return begun

    async def step(self, action: Any) -> StepResult:
        found: StepResult = await self._call("step", {"action": action})
        return found

    async def get_state(self) -> Any:
        return await self._call("get_state", {})

    async def load_state(self, state: Any) -> None:
        await self._call("load_state", {"state": state})

    async def close(self) -> None:
        """The lease ends with its context."""


class RemoteTools(Environment):
    """A tool environment elsewhere."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def ainitialize(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        await self._call("ainitialize", {"seed": seed, "options": options})

    async def list_tools(self) -> list[ToolSchema]:
        schemas: list[ToolSchema] = await self._call("list_tools", {})
        return schemas

    async def aexecute(self, tool_name: str, tool_args: Mapping[str, Any]) -> ToolResult | str:
        result: ToolResult | str = await self._call("aexecute", {"tool_name": tool_name, "tool_args": dict(tool_args)})
        return result


def stand_in(spec: EnvironmentSpec, call: Call) -> StepEnvironment | Environment:
    """What an episode uses in place of the environment that `call` reaches."""
    return RemoteTools(call) if spec.offers_tools else RemoteSteps(call)
