"""vLLM's processes end with the process that owns the engine, however that ends.

The engine core would otherwise wait for requests for ever.  Each of them watches for itself, so none has to be found; and each
ends in an orderly way first, which removes its shared memory.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cache

import psutil

from rlhub.engines.rollout.vllm.environment import owner_pid

WATCH_S = 0.5
GRACE_S = 5


@cache
def end_with_owner() -> None:
    """Starts watching in a process of vLLM's, from a thread.  Does nothing in the owner itself, in others, and a second time."""
    owner = owner_pid()
    if owner is not None and owner != os.getpid():
        threading.Thread(target=_watch, args=(owner,), name="owner-watch", daemon=True).start()


def _watch(owner: int) -> None:
    while lives(owner):
        time.sleep(WATCH_S)
    signal.alarm(GRACE_S)  # the kernel's, which ends a process also where Python, on its way out, runs no thread any more
    os.kill(os.getpid(), signal.SIGTERM)


def lives(pid: int) -> bool:
    """Returns whether there is such a process that has not ended, also where its parent has not yet taken note of that."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
