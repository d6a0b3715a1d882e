"""Imported into a process before it builds an engine: the hf engine and vLLM's processes then keep to a file, see step_limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhub.engines.rollout.continuous_batching import Stepper, TokenEvent
from rlhub.engines.rollout.hf.engine import HFEngine
from rlhub.engines.rollout.vllm.async_engine import AsyncVLLMEngine
from tests.support.rollout_service import LimitedSteps, Pace
from tests.support.step_limit import at_limit

SCHEDULER = "tests.support.limited_scheduler.LimitedScheduler"


class ByFile(LimitedSteps):
    """A stepper whose steps are left out at the limit."""

    def step(self) -> Sequence[TokenEvent]:
        return [] if at_limit(max(self.given.values(), default=0), len(self.given)) else super().step()


def _make_stepper(engine: HFEngine, make: Any = HFEngine._make_stepper) -> Stepper:
    return ByFile(make(engine), Pace())


async def _build(engine: AsyncVLLMEngine, build: Any = AsyncVLLMEngine._build) -> Any:
    from rlhub.engines.rollout.vllm import entrypoints  # imports vLLM, which reads the environment that is set for it by now

    arguments = entrypoints.engine_arguments
    entrypoints.engine_arguments = lambda *given: {**arguments(*given), "scheduler_cls": SCHEDULER}
    try:
        return await build(engine)
    finally:
        entrypoints.engine_arguments = arguments


HFEngine._make_stepper = _make_stepper  # type: ignore[method-assign]
AsyncVLLMEngine._build = _build  # type: ignore[method-assign]
