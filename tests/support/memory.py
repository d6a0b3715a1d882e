"""What a process has in memory, without what it has freed and kept."""

from __future__ import annotations

import ctypes
from pathlib import Path

from rlhub.utils.freed_memory import M_MMAP_MAX, M_TRIM_THRESHOLD

GLIBCS_MMAP_MAX, GLIBCS_TRIM_THRESHOLD = 65536, 128 * 1024


def give_freed_memory_back() -> None:
    """Now and from now on, as glibc does by itself: large blocks are seen when they are taken."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, GLIBCS_MMAP_MAX)
    libc.mallopt(M_TRIM_THRESHOLD, GLIBCS_TRIM_THRESHOLD)
    libc.malloc_trim(0)


def reset_peak() -> int:
    """Bytes that are resident now; `peak` counts from here."""
    give_freed_memory_back()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Most bytes that were resident since `reset_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
