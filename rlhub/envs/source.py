"""Leases environments to episodes: the interface EnvironmentSource, the source of this process, its pools, and the table of
leases.

    async with source.lease(spec, data.session) as environment:
        observation, info = await environment.reset(seed=3)

Workflows lease environments and never build them, so that these may run in this process or in actors on other machines.

Simulators are slow to build and hold the interpreter lock while they compute; in the processes of an EnvironmentPool they are
built once and run in parallel.  A process that dies, hangs or exceeds its memory limit fails only the episode that leased it, and
the next lease gets a new one.  The processes are those of process.py.  LeaseTable holds the leases of callers in other processes,
by number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhub.envs.base import EnvDiedError, Environment, EnvironmentLimits, StepEnvironment
from rlhub.envs.local import BoundedEnvironment, LocalEnvironment
from rlhub.envs.process import EnvironmentProcess
from rlhub.envs.registry import environment_factory, environment_target
from rlhub.envs.remote import METHODS, remote_environment
from rlhub.utils.children.access import Access


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvironmentSpec:
    """The environment of a lease, and how it runs.  It is sent to the process that runs it.

    name: registered, `module:name` or `path/to/file.py:name`, called with `settings`.

    num_workers: the number of processes that run it, in this process or in each environment actor; 0: it runs without processes
    of its own and with any number of leases.  Only a call that hangs in such a process can be ended.

    env: environment variables that these processes receive although their names look like secrets.  offers_tools: it is an
    `Environment`; without processes of its own it runs on the event loop.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_workers: int = 0
    limits: EnvironmentLimits = field(default_factory=EnvironmentLimits)
    offers_tools: bool = False
    env: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        """Returns the maximum number of leases at once in one process or actor, 0 for no limit."""
        return self.num_workers

    @property
    def key(self) -> str:
        """Returns a text that is equal for equal specs."""
        return repr(self)


class EnvironmentSource(Protocol):
    """Leases environments to episodes."""

    def lease(self, spec: EnvironmentSpec, session: str) -> AbstractAsyncContextManager[StepEnvironment | Environment]:
        """Leases an environment to the episode `session` until the context ends; waits while all are taken.

        Raises LoadError if it cannot be built.  EnvDiedError, here or from its methods, means that the process or actor that runs
        it has ended and the episode's state is lost.
        """
        ...


def offers_tools(factory: Any) -> bool:
    """Returns whether a factory that the user named builds an `Environment`; if not, it builds a step environment."""
    return isinstance(factory, type) and issubclass(factory, Environment)


class LocalEnvironmentSource:
    """An EnvironmentSource that runs environments in this process and in processes of its own.  It belongs to one event loop."""

    def __init__(self) -> None:
        self._pools: dict[str, EnvironmentPool] = {}

    @asynccontextmanager
    async def lease(self, spec: EnvironmentSpec, session: str) -> AsyncIterator[StepEnvironment | Environment]:
        """Leases an environment; see EnvironmentSource."""
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
        """Returns the pool for this spec; its processes start when they are needed."""
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
        """Returns all pools that exist."""
        return list(self._pools.values())

    async def aclose(self) -> None:
        """Ends all processes.  Idempotent."""
        pools, self._pools = self.pools, {}
        await asyncio.gather(*(pool.aclose() for pool in pools))


class EnvironmentPool:
    """Runs environments in killable processes, each leased to one episode at a time.  It belongs to one event loop.

    target: `module:name` or `path/to/file.py:name`, called with `settings` in each process.  offers_tools: it builds an
    `Environment`, a new one for every lease; otherwise a simulator, which serves one lease after the other.  env: environment
    variables that the processes receive although their names look like secrets.
    """

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any],
        *,
        num_workers: int,
        offers_tools: bool = False,
        limits: EnvironmentLimits | None = None,
        env: Sequence[str] = (),
    ) -> None:
        self._making = {"target": target, "settings": dict(settings), "kind": "tools" if offers_tools else "simulator"}
        self._offers_tools = offers_tools
        self._access = Access(setting="actor_rollout_ref.rollout.agent.kwargs.env", env=tuple(env))
        self._limits = limits or EnvironmentLimits()
        self._processes: list[EnvironmentProcess | None] = [None] * num_workers
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for number in reversed(range(num_workers)):
            self._free.put_nowait(number)
        self.num_replaced = 0

    @property
    def num_alive(self) -> int:
        """Returns the number of running processes."""
        return sum(process is not None and not process.dead for process in self._processes)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[StepEnvironment | Environment]:
        """Leases an environment to one episode; waits while all are taken.  Raises LoadError if it cannot be built.

        EnvDiedError and DeadlineError from any of its methods mean that its process has ended, and with it the episode.  A call
        that is cancelled ends the process too, because its state is unknown then.
        """
        number = await self._free.get()
        try:
            process = await self._process(number)
            try:
                yield remote_environment(process.call, offers_tools=self._offers_tools)
            finally:
                if self._offers_tools and not process.dead:
                    await process.call("aclose", {})
        finally:
            self._free.put_nowait(number)

    async def get_state(self) -> list[Any]:
        """Returns the state of each process's simulator, None where none runs.  No other call may be in progress."""
        return [
            None if process is None or process.dead else await process.call("get_state", {}) for process in list(self._processes)
        ]

    async def load_state(self, states: list[Any]) -> None:
        """Loads the states of a pool of the same size; missing simulators are built."""
        if len(states) != len(self._processes):
            raise ValueError(f"states of {len(states)} processes, but the pool has {len(self._processes)}")
        for number, state in enumerate(states):
            if state is not None:
                process = await self._process(number)
                await process.call("load_state", {"state": state})

    async def aclose(self) -> None:
        """Ends all processes.  Idempotent; a later lease starts new ones."""
        processes = [process for process in self._processes if process is not None]
        self._processes = [None] * len(self._processes)
        await asyncio.gather(*(process.kill() for process in processes))

    async def _process(self, number: int) -> EnvironmentProcess:
        """Returns the process with this number, and starts it if it does not run."""
        process = self._processes[number]
        if process is not None and not process.dead:
            return process
        self.num_replaced += process is not None
        started = await EnvironmentProcess.start(self._making, self._limits, self._access)
        self._processes[number] = started
        return started


class LeaseTable:
    """Environments of a source by the numbers of their leases, which the callers choose.  It belongs to one event loop.

    An actor that runs environments uses it to answer calls, and so does a driver that leases them for episodes in other
    processes; the episode's side of these calls is remote.py.  Arguments and results are passed unchanged, images as arrays.
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
        """Calls a method of a leased environment, after earlier calls have ended.  Raises EnvDiedError if there is no such
        lease."""
        if method not in METHODS:
            raise ValueError(f"environments have no method {method!r}; known: {', '.join(sorted(METHODS))}")
        lease = self._leases.get(number)
        if lease is None:
            raise EnvDiedError(f"{method}: the environment is not leased any more")
        async with lease.one_at_a_time:
            self.calls += 1
            return await getattr(lease.environment, method)(**arguments)

    async def release(self, number: int) -> None:
        """Ends a lease, after the call in progress.  Does nothing for a lease that has ended."""
        lease = self._leases.get(number)
        if lease is not None:
            async with lease.one_at_a_time:
                if self._leases.pop(number, None) is not None:
                    await lease.stack.aclose()

    async def release_all(self) -> None:
        """Ends all leases."""
        await asyncio.gather(*(self.release(number) for number in list(self._leases)), return_exceptions=True)


class _LeasedEnvironment:
    """A leased environment, the context that holds it, and the lock that serializes its calls."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.one_at_a_time = asyncio.Lock()
        self.environment: Any = None
