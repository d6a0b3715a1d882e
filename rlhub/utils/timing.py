"""Wall-clock timing of named phases, summed until they are drained.

Phases are disjoint: time that is counted inside a measured block (a worker call, an inner block) belongs to its own name and is
subtracted from the block's, so the phases of a step sum up to at most the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PREFIX = "timing_s/"
NODE_TIME = "perf/node_s/"
"""Begins the metrics with the seconds of each node of a step that is a graph; of nodes that run at the same time they overlap."""


class _Open(threading.local):
    """Keeps for each open block of a thread, outermost first, the seconds counted inside it."""

    def __init__(self) -> None:
        self.inside: list[float] = []


class PhaseTimer:
    """Sums the seconds spent under each name.  It may be used from several threads at once.

        timer = PhaseTimer()
        with timer.measure("save"):                # the driver's own part
            timer.add("save_checkpoint", 1.7)      # a worker call inside it
        metrics.update(timer.drain())              # {"timing_s/save_checkpoint": 1.7, "timing_s/save": 0.02}

    on_block: receives the name, start and end (time.perf_counter()) of every measured block, including the time counted inside
    it.
    """

    def __init__(self, on_block: Callable[[str, float, float], None] | None = None) -> None:
        self._on_block = on_block
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._open = _Open()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Counts the block's duration under `name`, without the time counted inside it; also if the block raises."""
        start = time.perf_counter()
        self._open.inside.append(0.0)
        try:
            yield
        finally:
            end = time.perf_counter()
            self._count(name, max(0.0, end - start - self._open.inside.pop()))
            self._note_inside(end - start)
            if self._on_block is not None:
                self._on_block(name, start, end)

    def add(self, name: str, seconds: float) -> None:
        """Counts a duration that the caller has measured."""
        self._count(name, seconds)
        self._note_inside(seconds)

    def _note_inside(self, seconds: float) -> None:
        if self._open.inside:
            self._open.inside[-1] += seconds

    def _count(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def so_far(self) -> dict[str, float]:
        """Returns the sums as metrics `timing_s/<name>`, in the order in which the names first came.  Counting continues."""
        with self._lock:
            return {PREFIX + name: value for name, value in self._seconds.items()}

    def drain(self) -> dict[str, float]:
        """Returns the same as `so_far`, and starts counting from zero."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return {PREFIX + name: value for name, value in seconds.items()}
