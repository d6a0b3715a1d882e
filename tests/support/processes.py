"""Whether processes have ended; one may end at any moment, between two looks too."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil


def alive(pid: int) -> bool:
    """A zombie has ended: only whoever inherited it has not collected it yet."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def all_end(pids: Collection[int], within_s: float = 60.0) -> bool:
    """Waits for them."""
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
