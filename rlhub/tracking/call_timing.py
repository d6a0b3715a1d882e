"""Timing of worker-group calls, attached in dispatch: the training loop itself holds no timers."""

from __future__ import annotations

from collections.abc import Callable

from rlhub.single_controller.observer import Call
from rlhub.utils.timing import PhaseTimer


class CallTiming:
    """A CallObserver: each call's seconds go into the timer under the method's name; `on_phase` is told when it starts."""

    def __init__(self, timer: PhaseTimer, on_phase: Callable[[str], None] | None = None) -> None:
        self._timer = timer
        self._on_phase = on_phase

    def on_start(self, call: Call) -> None:
        if self._on_phase is not None:
            self._on_phase(call.method)

    def on_end(self, call: Call, seconds: float, error: BaseException | None) -> None:
        if error is None:
            self._timer.add(call.method, seconds)
