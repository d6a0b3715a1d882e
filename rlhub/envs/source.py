"""Where episodes get their environments: `EnvironmentSource`, and the one of a process that runs them itself.

    async with source.lease(spec, data.session) as environment:
        observation, info = await environment.reset(seed=3)

Workflows lease and never make environments, so that these may live here, or in actors on other machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhub.envs.base import Environment, StepEnvironment
from rlhub.envs.bounded import BoundedEnvironment
from rlhub.envs.local import LocalEnvironment
from rlhub.envs.pool import EnvironmentPool, PoolLimits
from rlhub.envs.registry import environment_factory, environment_target
from rlhub.envs.tool_pool import ToolPool


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvironmentSpec:
    """Which environment, and how it runs; it travels to where that is.

    name: registered, `module:name` or `path/to/file.py:name`, called with `settings`.
    num_workers: processes that run it, in each place where it runs; 0: none of their own, and as many as are asked for.  Only a
    call that hangs in such a process can be ended.
    env: environment variables that those processes are given though they look like secrets.
    offers_tools: it is an `Environment`, which without such processes runs on the event loop of its place.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_workers: int = 0
    limits: PoolLimits = field(default_factory=PoolLimits)
    offers_tools: bool = False
    env: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        """How many may be leased at once in one place; 0: no limit."""
        return self.num_workers

    @property
    def key(self) -> str:
        """Equal for equal specs."""
        return repr(self)


class EnvironmentSource(Protocol):
    """Lends environments to episodes."""

    def lease(self, spec: EnvironmentSpec, session: str) -> AbstractAsyncContextManager[StepEnvironment | Environment]:
        """One for the episode `session`, its own until the context ends; waits while all are taken.

        LoadError if it cannot be made.  EnvDiedError, then and later: what runs it has ended, and the episode's state is lost.
        """
        ...


class OwnEnvironments:
    """An EnvironmentSource that runs them in this process and in processes of its own.  Belongs to one event loop."""

    def __init__(self) -> None:
        self._pools: dict[str, EnvironmentPool] = {}

    @asynccontextmanager
    async def lease(self, spec: EnvironmentSpec, session: str) -> AsyncIterator[StepEnvironment | Environment]:
        """See EnvironmentSource."""
        if spec.places:
            pool = self.pool(spec)
            async with pool.lease_tools() if isinstance(pool, ToolPool) else pool.lease() as leased:
                yield leased
            return
        made = environment_factory(spec.name)(**spec.settings)
        if isinstance(made, Environment):
            try:
                yield made
            finally:
                await made.aclose()
            return
        environment = (
            BoundedEnvironment(made, spec.limits)
            if isinstance(made, StepEnvironment)
            else LocalEnvironment(made, timeout_s=spec.limits.longest_s)
        )
        try:
            yield environment
        finally:
            await environment.close()

    def pool(self, spec: EnvironmentSpec) -> EnvironmentPool:
        """The processes for this spec; they start as they are needed."""
        if spec.key not in self._pools:
            target, make = environment_target(spec.name), ToolPool if spec.offers_tools else EnvironmentPool
            self._pools[spec.key] = make(target, spec.settings, num_workers=spec.num_workers, limits=spec.limits, env=spec.env)
        return self._pools[spec.key]

    @property
    def pools(self) -> list[EnvironmentPool]:
        """All that were asked for."""
        return list(self._pools.values())

    async def aclose(self) -> None:
        """End all processes.  Idempotent."""
        pools, self._pools = self.pools, {}
        await asyncio.gather(*(pool.aclose() for pool in pools))


def offers_tools(factory: Any) -> bool:
    """Whether what the user named makes an `Environment`; else it makes something with steps."""
    return isinstance(factory, type) and issubclass(factory, Environment)
