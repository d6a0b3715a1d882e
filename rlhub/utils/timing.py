"""Wall-clock timing of named phases, collected until somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "timing_s/"


class PhaseTimer:
    """Adds up the seconds spent under each name.  May be used from several threads at once.

    timer = PhaseTimer()
    with timer.measure("reward"):
        ...
    metrics.update(timer.drain())    # {"timing_s/reward": 0.31}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the block's duration under `name`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count a duration measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """The sums as metrics `timing_s/<name>`, in the order the names first came; counting starts anew."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return {PREFIX + name: value for name, value in seconds.items()}
