"""The CPU time of a program with all processes below it, those of clusters that it starts included.

A process that has left the tree, as the daemons of a cluster do, or that nobody waits for, is in no parent's account.  So the
tree is read once a second, and each process counts as it was seen last: one that ends or leaves the tree within a second is
missed, and of each other one at most its last second.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
INTERVAL_S = 1.0


class CPUTime:
    """Counts while it is open: `with CPUTime() as cpu: ...; cpu.seconds`."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    @property
    def seconds(self) -> float:
        """Returns user and system time of all processes so far."""
        return sum(self._seen.values()) / TICKS

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        """Reads the processes that are below this one or below one that was."""
        found = {(pid, begun): (parent, ticks) for pid, parent, begun, ticks in processes()}
        known = {os.getpid(), *(pid for pid, begun in self._seen if (pid, begun) in found)}
        below = known
        while below:
            known |= below
            below = {pid for (pid, _), (parent, _) in found.items() if parent in known} - known
        self._seen |= {key: ticks for key, (_, ticks) in found.items() if key[0] in known}


def processes() -> Iterator[tuple[int, int, int, int]]:
    """Yields id, parent, start time and CPU time (both in ticks) of each process; nothing where there is no /proc."""
    for folder in PROC.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        yield int(folder.name), int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12])
