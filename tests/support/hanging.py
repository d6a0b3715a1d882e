"""Calls in killable children that hang are ended at their deadline, and no other call can miss it: not where its process gets no
core for a while either.  A call that hangs says so first, in a file beside the function's own with the number of its process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlhub.utils.children.pool import KillablePool
from rlhub.utils.children.process import ChildProcess

SAYS_SO = 'open(f"{__file__}.{os.getpid()}.hangs", "w").close()'
"""What the function does first."""
LOOK_S = 0.05


def mark(file: Path, pid: int) -> Path:
    """Where the child with this number says that it hangs."""
    return file.with_name(f"{file.name}.{pid}.hangs")


def only_hanging_calls_are_late(patch: pytest.MonkeyPatch, file: Path) -> None:
    """For all pools of this process; file: of their function."""
    real = KillablePool._deadline

    def deadline(pool: KillablePool, child: ChildProcess) -> float:
        own = real(pool, child)
        hangs = not child.ready or mark(file, child.pid).exists()
        return own if hangs else max(own, time.monotonic() + LOOK_S)

    patch.setattr(KillablePool, "_deadline", deadline)
