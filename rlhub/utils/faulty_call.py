"""A call in a killable child that fails as a fault plan says: the target of a pool where faults are planned for its function.

Standard library only, as all that a child loads before the function itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time
from typing import Any

from rlhub.utils.children.child import load

TARGET = "rlhub.utils.faults:call"
PARAMETERS = ("target", "fault", "arguments")
_loaded = functools.cache(load)


def call(target: str, fault: str | None, arguments: dict[str, Any]) -> Any:
    """What `target` returns for the arguments, unless the fault keeps it from that."""
    function = _loaded(target)
    match fault:
        case "raise":
            raise RuntimeError("by trainer.faults")
        case "delay":
            time.sleep(1e6)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "nonfinite":
            return float("nan")
    return function(**arguments)
