"""A user's StepEnvironment with a deadline on every call, as those in threads and processes have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from rlhub.envs.base import Observation, StepEnvironment, StepResult
from rlhub.envs.local import observed
from rlhub.envs.pool import PoolLimits
from rlhub.errors import DeadlineError


class BoundedEnvironment(StepEnvironment):
    """Calls run on the caller's event loop, and are cancelled at their deadline."""

    def __init__(self, environment: StepEnvironment, limits: PoolLimits) -> None:
        self._environment, self._limits = environment, limits

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        begun = self._environment.reset(seed=seed, options=options)
        observation, info = await _within("reset", self._limits.reset_timeout_s, begun)
        return observed(observation), info

    async def step(self, action: Any) -> StepResult:
        found = await _within("step", self._limits.step_timeout_s, self._environment.step(action))
        observation, reward, terminated, truncated, info = found
        return observed(observation), float(reward), bool(terminated), bool(truncated), info

    async def get_state(self) -> Any:
        return await _within("get_state", self._limits.reset_timeout_s, self._environment.get_state())

    async def load_state(self, state: Any) -> None:
        await _within("load_state", self._limits.reset_timeout_s, self._environment.load_state(state))

    async def close(self) -> None:
        await _within("close", self._limits.reset_timeout_s, self._environment.close())


async def _within(what: str, seconds: float, work: Awaitable[Any]) -> Any:
    """DeadlineError after `seconds`; a TimeoutError of the environment's own stays one."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineError(f"environment {what}", seconds) from error
