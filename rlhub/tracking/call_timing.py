"""Timing of worker-group calls, attached in dispatch: the training loop itself holds no timers."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhub.single_controller.calls import ObservedCall
from rlhub.tracking.spans import RecordSpan, ignore_span
from rlhub.utils.timing import PhaseTimer


class CallTiming:
    """A CallObserver: each call's seconds go into the timer under the method's name; `on_phase` is told when it starts.

    Calls that run at the same time share theirs: one counts from the end of the call that was read before it, so that the
    phases still add up to the time that passed.  `record` is told of each call's whole stretch, on the lane of its role.
    """

    def __init__(
        self, timer: PhaseTimer, on_phase: Callable[[str], None] | None = None, record: RecordSpan = ignore_span
    ) -> None:
        self._timer = timer
        self._record = record
        self._on_phase = on_phase
        self._last_end = 0.0

    def on_start(self, call: ObservedCall) -> None:
        if self._on_phase is not None:
            self._on_phase(call.method)

    def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None:
        now = time.perf_counter()
        failed = {} if error is None else {"failed": type(error).__name__}
        self._record(call.role, call.method, now - seconds, now, **failed)
        if error is None:
            self._timer.add(call.method, min(seconds, now - self._last_end))
        self._last_end = now
