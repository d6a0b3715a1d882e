"""A limit of CPU time for work that may take for ever, however busy the machine is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfCpuTime(BaseException):
    """The limit has passed.  Not an Exception: libraries catch those wherever they go on without an answer."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfCpuTime inside as soon as this process has used so many seconds of CPU time.

    Only Python's main thread can be interrupted; elsewhere there is no limit.  Code that never returns to Python is interrupted
    when it does: who cannot wait runs it in a process that can be killed, as the reward functions are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


def _interrupt(*_: object) -> None:
    raise OutOfCpuTime
