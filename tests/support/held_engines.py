"""Imported into a process before it builds an engine: the hf engine and vLLM's processes then keep to a file, see held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhub.engines.rollout.continuous_batching import Stepper, TokenEvent
from rlhub.engines.rollout.hf.engine import HFEngine
from rlhub.engines.rollout.vllm.async_engine import AsyncVLLMEngine
from tests.support.held import held
from tests.support.rollout_service import HeldSteps, Pace

SCHEDULER = "tests.support.held_scheduler.HeldScheduler"


class ByFile(HeldSteps):
    """A stepper that is left out while it is held."""

    def step(self) -> Sequence[TokenEvent]:
        return [] if held(max(self.given.values(), default=0), len(self.given)) else super().step()


def _make_stepper(engine: HFEngine, make: Any = HFEngine._make_stepper) -> Stepper:
    return ByFile(make(engine), Pace())


async def _build(engine: AsyncVLLMEngine, build: Any = AsyncVLLMEngine._build) -> Any:
    from rlhub.engines.rollout.vllm import client  # imports vLLM, which reads the environment that is set for it by now

    arguments = client.engine_arguments
    client.engine_arguments = lambda *given: {**arguments(*given), "scheduler_cls": SCHEDULER}
    try:
        return await build(engine)
    finally:
        client.engine_arguments = arguments


HFEngine._make_stepper = _make_stepper  # type: ignore[method-assign]
AsyncVLLMEngine._build = _build  # type: ignore[method-assign]
