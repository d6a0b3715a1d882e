"""SIGTERM and Ctrl-C: before the first step they stop at once, then they ask to stop at the next safe point."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)


class StopSignals:
    """Context manager that turns the first SIGINT or SIGTERM after `defer` into `requested`, so that the loop can save and
    leave.

    Before `defer`, while models are built and there is nothing to save, SIGINT raises KeyboardInterrupt and SIGTERM
    SystemExit; so does a second SIGINT.  Former handlers are restored on exit.  Outside the main thread, where Python allows
    no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._deferring = False
        self._former: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._received is not None

    def defer(self) -> None:
        """Makes signals set `requested` from now on, instead of ending the process."""
        self._deferring = True

    @property
    def exit_code(self) -> int:
        """The status that the process should exit with: 128 + the signal's number, or 0 when none came."""
        return 0 if self._received is None else 128 + self._received.value

    @property
    def reason(self) -> str:
        return "" if self._received is None else self._received.name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signal.Signals(number)
        if not self._deferring:
            logger.warning("%s: stopping at once, there is nothing to save yet", self._received.name)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.exit_code)
        logger.warning("%s: stopping after this step; Ctrl-C again stops at once", self._received.name)
