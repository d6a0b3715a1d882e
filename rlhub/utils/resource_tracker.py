"""Python's resource tracker, the child that removes the shared memory of processes which were killed, where it outlives them.

It ends when the last process that holds its pipe has ended.  Ray kills the whole process group of a worker that died, the tracker
with it, before that.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from multiprocessing import resource_tracker, util

_started: list[subprocess.Popen[bytes]] = []


def start_apart() -> None:
    """Starts this process's tracker, which its children share, in a session of its own; does nothing where one runs already."""
    original = util.spawnv_passfds
    util.spawnv_passfds = _spawn_apart  # type: ignore[assignment]  # it takes any sequence of descriptors
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = original


def _spawn_apart(path: bytes | str, arguments: Sequence[bytes | str], descriptors: Sequence[int]) -> int:
    """As multiprocessing's own, but for the session."""
    process = subprocess.Popen(
        [os.fsdecode(argument) for argument in arguments],
        executable=os.fsdecode(path),
        pass_fds=[fd for fd in descriptors if fd >= 0],
        start_new_session=True,
    )
    _started.append(process)
    return process.pid
