"""Engines that are driven step by step, stopped in a chosen step: what a test does to requests under way meets them there,
however fast the engine and however late the test's own thread are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence

from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.continuous_batching import EngineLoop, SteppedEngine, Stepper, TokenEvent

LIMIT_S = 120.0


class StopAt:
    """A stepper whose loop is told to pause during step number `at`.  begun: this step is under way; it goes on with `go`."""

    def __init__(self, inner: Stepper, loop: EngineLoop, at: int) -> None:
        self.inner, self._loop, self._left = inner, loop, at
        self.begun, self.go, self.reached = threading.Event(), threading.Event(), threading.Event()

    def step(self) -> Sequence[TokenEvent]:
        self._left -= 1
        if self._left == 0:
            self.begun.set()
            self.go.wait(LIMIT_S)
        events = self.inner.step()
        if self._left == 0:
            self._loop._paused = True  # what pause() does first; it would wait here for itself
            self.reached.set()
        return events

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self.inner.add(key, request, params)

    def remove(self, keys: Collection[int]) -> None:
        self.inner.remove(keys)

    def recompute(self) -> None:
        self.inner.recompute()


async def run_to(engine: SteppedEngine, at: int) -> StopAt:
    """Resume a paused engine, for which requests wait; returns when step number `at` is under way."""
    loop = engine._loop
    assert loop.paused and loop._stepper is not None
    stop = loop._stepper = StopAt(loop._stepper, loop, at)
    engine.resume()
    assert await asyncio.to_thread(stop.begun.wait, LIMIT_S)
    return stop


async def halt(engine: SteppedEngine, stop: StopAt) -> None:
    """Let that step end, and no other begin: the engine is paused."""
    stop.go.set()
    assert await asyncio.to_thread(stop.reached.wait, LIMIT_S)
    engine.pause()
    engine._loop._stepper = stop.inner
