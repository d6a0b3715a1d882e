"""SIGTERM and Ctrl-C: finish the step, save, stop; a second signal stops at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class StopSignals:
    """`received` is the first signal's number, None before.  Handlers are put back on exit; no-op outside the main thread."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt(f"second signal ({signal.Signals(number).name}): stopping at once")
        self.received = number
        logger.warning("%s: stopping after this step; once more stops at once", signal.Signals(number).name)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it; 0 when none came."""
        return 0 if self.received is None else 128 + self.received
