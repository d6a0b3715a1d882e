"""Environments in this process, with a deadline on every call.

LocalEnvironment makes a StepEnvironment of a simulator with plain methods.  Each call runs in a thread, so that a slow one does
not hold up other episodes.  A thread cannot be ended: after a passed deadline the environment accepts no more calls, and the
thread continues.  Simulators that may hang belong into a pool.

BoundedEnvironment wraps a user's StepEnvironment, whose calls run on the caller's event loop and are cancelled at their deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlhub.envs.base import EnvError, EnvironmentLimits, ImageObservation, Observation, StepEnvironment, StepResult
from rlhub.errors import DeadlineError


class LocalEnvironment(StepEnvironment):
    """Runs a simulator in threads.  timeout_s: time limit of one call in seconds."""

    def __init__(self, simulator: Any, *, timeout_s: float) -> None:
        self._simulator, self._timeout_s = simulator, timeout_s
        self._unusable = ""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observation, info = await self._call("reset", self._simulator.reset, seed=seed, options=options)
        return observed(observation), info

    async def step(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = await self._call("step", self._simulator.step, action)
        return observed(observation), float(reward), bool(terminated), bool(truncated), info

    async def get_state(self) -> Any:
        return await self._call("get_state", optional_method(self._simulator, "get_state"))

    async def load_state(self, state: Any) -> None:
        await self._call("load_state", optional_method(self._simulator, "load_state"), state)

    async def close(self) -> None:
        if not self._unusable:
            await self._call("close", self._simulator.close)
            self._unusable = "it is closed"

    async def _call(self, what: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self._unusable:
            raise EnvError(f"the environment takes no more calls: {self._unusable}")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.to_thread(function, *arguments, **keywords)
        except TimeoutError as error:
            self._unusable = f"its {what} was not done after {self._timeout_s:g} s"
            raise DeadlineError(f"environment {what}", self._timeout_s, "a pool of processes can end it") from error


class BoundedEnvironment(StepEnvironment):
    """Adds deadlines to a StepEnvironment of the user."""

    def __init__(self, environment: StepEnvironment, limits: EnvironmentLimits) -> None:
        self._environment, self._limits = environment, limits

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observation, info = await self._within("reset", self._environment.reset(seed=seed, options=options))
        return observed(observation), info

    async def step(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = await self._within("step", self._environment.step(action))
        return observed(observation), float(reward), bool(terminated), bool(truncated), info

    async def get_state(self) -> Any:
        return await self._within("get_state", self._environment.get_state())

    async def load_state(self, state: Any) -> None:
        await self._within("load_state", self._environment.load_state(state))

    async def close(self) -> None:
        await self._within("close", self._environment.close())

    async def _within(self, method: str, work: Awaitable[Any]) -> Any:
        """Waits for `work`.  Raises DeadlineError at its deadline; a TimeoutError of the environment itself is passed on."""
        seconds = self._limits.timeout_s(method)
        try:
            async with asyncio.timeout(seconds) as limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(f"environment {method}", seconds) from error


def observed(value: Any) -> Observation:
    """Returns text and images unchanged.  Raises EnvError for anything else."""
    if isinstance(value, str | ImageObservation):
        return value
    raise EnvError(f"an observation is text or an ImageObservation, not a {type(value).__name__}: {value!r:.80}")


def optional_method(simulator: Any, name: str) -> Callable[..., Any]:
    """Returns a method that not every simulator has.  Raises EnvError if this one lacks it."""
    method = getattr(simulator, name, None)
    if method is None:
        raise EnvError(f"{type(simulator).__name__} has no {name}")
    return method  # type: ignore[no-any-return]
