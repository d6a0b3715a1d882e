"""EnvironmentPool: simulators in processes, leased to episodes one at a time.

Simulators are slow to make and hold the interpreter while they compute; in processes they are made once and run in parallel.
A process that dies, hangs or eats its memory costs the one episode that leased it: the next lease gets a fresh one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rlhub.envs.base import Observation, StepEnvironment, StepResult
from rlhub.envs.child import unpacked
from rlhub.envs.process import SERVE, EnvProcess
from rlhub.utils.children.access import Access


@dataclass(slots=True, kw_only=True)
class PoolLimits:
    """Seconds for a reset and for a step (saving and loading state counts as a reset); memory of one process."""

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    memory_gb: float = 8.0

    @property
    def longest_s(self) -> float:
        return max(self.reset_timeout_s, self.step_timeout_s)


class PooledEnvironment(StepEnvironment):
    """A leased simulator.  EnvDiedError and DeadlineError: its process is gone, and the episode with it."""

    def __init__(self, process: EnvProcess, limits: PoolLimits) -> None:
        self._process, self._limits = process, limits

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        arguments = {"seed": seed, "options": None if options is None else dict(options)}
        observation, info = await self._process.call("reset", arguments, self._limits.reset_timeout_s)
        return unpacked(observation), info

    async def step(self, action: Any) -> StepResult:
        value = await self._process.call("step", {"action": action}, self._limits.step_timeout_s)
        observation, reward, terminated, truncated, info = value
        return unpacked(observation), reward, terminated, truncated, info

    async def get_state(self) -> Any:
        return await self._process.call("get_state", {}, self._limits.reset_timeout_s)

    async def load_state(self, state: Any) -> None:
        await self._process.call("load_state", {"state": state}, self._limits.reset_timeout_s)

    async def close(self) -> None:
        """The lease ends with its context; the simulator lives on for the next one."""


class EnvironmentPool:
    """Belongs to one event loop.  target: `module:name` or `path/to/file.py:name`, called with `settings` in each process.

    serve: what answers the calls there.  env: environment variables that it may read though they look like secrets.
    """

    serve = SERVE

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any],
        *,
        num_workers: int,
        limits: PoolLimits | None = None,
        env: Sequence[str] = (),
    ) -> None:
        self._target, self._settings = target, dict(settings)
        self._access = Access(setting="actor_rollout_ref.rollout.agent.kwargs.env", env=tuple(env))
        self._limits = limits or PoolLimits()
        self._slots: list[EnvProcess | None] = [None] * num_workers
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for number in reversed(range(num_workers)):
            self._free.put_nowait(number)
        self.num_replaced = 0

    @property
    def num_alive(self) -> int:
        """Processes that are up."""
        return sum(process is not None and not process.dead for process in self._slots)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[PooledEnvironment]:
        """A simulator for one episode; waits while all are taken.  LoadError if it cannot be made."""
        number = await self._free.get()
        try:
            yield PooledEnvironment(await self._process(number), self._limits)
        finally:
            self._free.put_nowait(number)

    async def _process(self, number: int) -> EnvProcess:
        """The slot's process, started if it has none that lives."""
        process = self._slots[number]
        if process is not None and not process.dead:
            return process
        self.num_replaced += process is not None
        started = await EnvProcess.start(
            self._target, self._settings, memory_gb=self._limits.memory_gb, access=self._access, serve=self.serve
        )
        self._slots[number] = started
        return started

    async def get_state(self) -> list[Any]:
        """The state of each process's simulator, None where none runs.  No call may be under way."""
        running = [process if process is not None and not process.dead else None for process in self._slots]
        return [None if process is None else await PooledEnvironment(process, self._limits).get_state() for process in running]

    async def load_state(self, states: list[Any]) -> None:
        """Go on from `get_state` of a pool of the same size; the simulators are made where they are missing."""
        if len(states) != len(self._slots):
            raise ValueError(f"states of {len(states)} processes, but the pool has {len(self._slots)}")
        for number, state in enumerate(states):
            if state is not None:
                await PooledEnvironment(await self._process(number), self._limits).load_state(state)

    async def aclose(self) -> None:
        """End all processes.  Idempotent; a later lease starts new ones."""
        processes, self._slots = [process for process in self._slots if process is not None], [None] * len(self._slots)
        await asyncio.gather(*(process.kill() for process in processes))
