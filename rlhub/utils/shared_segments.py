"""Memory that several processes of one machine map.

A segment is a file under /dev/shm.  Its name is needed only until all processes have opened it.  Its creator removes the name
then, so that nothing stays behind however the processes end.  Processes of environments import this module: it loads no torch.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import numpy as np

SHARED = Path("/dev/shm")


def new_segment_path() -> Path:
    """Returns a name that no other segment has."""
    return SHARED / f"rlhub-{os.getpid()}-{secrets.token_hex(8)}"


def open_segment(path: Path, *, create_bytes: int = 0) -> np.ndarray | None:
    """Returns the segment as bytes, (size,) uint8, that all processes share which open it.

    create_bytes: the size of a segment to create, with all its memory allocated; 0 opens an existing one.  Returns None if the
    machine refuses: there is no such file, or too little memory (containers often have 64 MiB).
    """
    try:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create_bytes else 0), 0o600)
        try:
            if create_bytes:
                os.posix_fallocate(descriptor, 0, create_bytes)
            mapped = mmap.mmap(descriptor, 0)  # all of it
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return np.frombuffer(mapped, dtype=np.uint8)
