"""The leases of environments to episodes: EnvironmentSource, the source of this process, and the table of a host's leases.

    async with source.lease(spec, data.session) as environment:
        observation, info = await environment.reset(seed=3)

Workflows lease environments and never make them, so that these may run here, or in actors on other machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhub.envs.base import EnvDiedError, Environment, EnvironmentLimits, StepEnvironment
from rlhub.envs.local import BoundedEnvironment, LocalEnvironment
from rlhub.envs.pool import EnvironmentPool
from rlhub.envs.registry import environment_factory, environment_target
from rlhub.envs.remote import METHODS


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvironmentSpec:
    """Which environment, and how it runs; it is sent to the process that runs it.

    name: registered, `module:name` or `path/to/file.py:name`, called with `settings`.
    num_workers: processes that run it, in each place where it runs; 0: none of their own, and as many as are asked for.  Only a
    call that hangs in such a process can be ended.
    env: environment variables that those processes are given though they look like secrets.
    offers_tools: it is an `Environment`, which without such processes runs on the event loop of its place.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_workers: int = 0
    limits: EnvironmentLimits = field(default_factory=EnvironmentLimits)
    offers_tools: bool = False
    env: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        """The most leases at once in one place; 0: no limit."""
        return self.num_workers

    @property
    def key(self) -> str:
        """Equal for equal specs."""
        return repr(self)


class EnvironmentSource(Protocol):
    """Leases environments to episodes."""

    def lease(self, spec: EnvironmentSpec, session: str) -> AbstractAsyncContextManager[StepEnvironment | Environment]:
        """Leases one to the episode `session`, its own until the context ends; waits while all are taken.

        LoadError if it cannot be made.  EnvDiedError, then and later: the process or actor that runs it has ended, and the
        episode's state is lost.
        """
        ...


class LocalEnvironmentSource:
    """An EnvironmentSource that runs them in this process and in processes of its own.  Belongs to one event loop."""

    def __init__(self) -> None:
        self._pools: dict[str, EnvironmentPool] = {}

    @asynccontextmanager
    async def lease(self, spec: EnvironmentSpec, session: str) -> AsyncIterator[StepEnvironment | Environment]:
        """See EnvironmentSource."""
        if spec.places:
            async with self.pool(spec).lease() as leased:
                yield leased
            return
        environment = environment_factory(spec.name)(**spec.settings)
        if isinstance(environment, Environment):
            try:
                yield environment
            finally:
                await environment.aclose()
            return
        steps = (
            BoundedEnvironment(environment, spec.limits)
            if isinstance(environment, StepEnvironment)
            else LocalEnvironment(environment, timeout_s=spec.limits.longest_s)
        )
        try:
            yield steps
        finally:
            await steps.close()

    def pool(self, spec: EnvironmentSpec) -> EnvironmentPool:
        """Returns the pool for this spec; its processes start as they are needed."""
        if spec.key not in self._pools:
            self._pools[spec.key] = EnvironmentPool(
                environment_target(spec.name),
                spec.settings,
                num_workers=spec.num_workers,
                offers_tools=spec.offers_tools,
                limits=spec.limits,
                env=spec.env,
            )
        return self._pools[spec.key]

    @property
    def pools(self) -> list[EnvironmentPool]:
        """All pools that were asked for."""
        return list(self._pools.values())

    async def aclose(self) -> None:
        """Ends all processes.  Idempotent."""
        pools, self._pools = self.pools, {}
        await asyncio.gather(*(pool.aclose() for pool in pools))


def offers_tools(factory: Any) -> bool:
    """Returns whether a factory that the user named makes an `Environment`; else it makes something with steps."""
    return isinstance(factory, type) and issubclass(factory, Environment)


class _LeasedEnvironment:
    """A leased environment, the context that holds it, and the turns of its calls."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.one_at_a_time = asyncio.Lock()
        self.environment: Any = None


class LeaseTable:
    """Environments of a source by the numbers of their leases, which their users choose.  Belongs to one event loop.

    An actor that hosts environments, and a driver that leases them for episodes in other processes, answer calls with it; the
    episode's side of those calls is remote.py.  Arguments and results travel as they are, images as arrays.
    """

    def __init__(self, source: EnvironmentSource) -> None:
        self._source = source
        self._leases: dict[int, _LeasedEnvironment] = {}
        self.calls = 0

    def __len__(self) -> int:
        return len(self._leases)

    async def open(self, number: int, spec: EnvironmentSpec, session: str) -> None:
        """Leases an environment; waits while all are taken."""
        lease = _LeasedEnvironment()
        lease.environment = await lease.stack.enter_async_context(self._source.lease(spec, session))
        self._leases[number] = lease

    async def call(self, number: int, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of a leased environment, after earlier calls have ended.  EnvDiedError: there is no such lease."""
        if method not in METHODS:
            raise ValueError(f"environments have no method {method!r}; known: {', '.join(sorted(METHODS))}")
        lease = self._leases.get(number)
        if lease is None:
            raise EnvDiedError(f"{method}: the environment is not leased any more")
        async with lease.one_at_a_time:
            self.calls += 1
            return await getattr(lease.environment, method)(**arguments)

    async def release(self, number: int) -> None:
        """Ends a lease, after the call that runs.  Does nothing for one that has ended."""
        lease = self._leases.get(number)
        if lease is not None:
            async with lease.one_at_a_time:
                if self._leases.pop(number, None) is not None:
                    await lease.stack.aclose()

    async def release_all(self) -> None:
        """Ends all leases."""
        await asyncio.gather(*(self.release(number) for number in list(self._leases)), return_exceptions=True)
