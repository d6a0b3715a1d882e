"""Keep the memory that a process frees, for its next step needs it again.

glibc returns freed blocks of more than 32 MB to the kernel at once, and smaller ones when much lies free at the end of the heap.
A training step on CPU frees all its activations, so the next one gets gigabytes from the kernel page by page, each page cleared
first: a third of the step's time on a virtual machine (`scripts/bench/kept_memory.py`).
"""

from __future__ import annotations

import ctypes
import os
import platform

# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
USERS_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """From now on, for the whole process: it stays as large as it was at its largest.

    False, and nothing is changed, where the user has tuned glibc's allocator by its environment variables, or the C library is
    not glibc.  Under another allocator (LD_PRELOAD) it has no effect.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USERS_SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    never = -1
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, never))
