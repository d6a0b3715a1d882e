"""A process that outlives its starter for a moment, to end what that left behind: `python -I -S orphans.py PID NAME VALUE`.

When process PID has ended, every process whose environment has NAME=VALUE is killed, and this one ends.  A program that is killed
cannot end what it started, and Ray's agents, whose cluster has gone, wait a minute for it to come back.  Only the standard
library is loaded, so that it costs a few megabytes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

LOOK_EVERY_S = 0.5
QUIET_S = 2.0
"""So long none was found: what was being started at that moment appears a little later."""


def marked(entry: bytes) -> list[int]:
    """Processes of this machine, but for this one, whose environment has the entry."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as stream:
                if entry in stream.read().split(b"\0"):
                    found.append(int(name))
    return found


def main(starter: int, entry: bytes) -> None:
    """Wait for the starter's end, then for that of all others."""
    while os.getppid() == starter:
        time.sleep(LOOK_EVERY_S)
    ends = time.monotonic() + QUIET_S
    while time.monotonic() < ends:
        for pid in marked(entry):
            ends = time.monotonic() + QUIET_S
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), f"{sys.argv[2]}={sys.argv[3]}".encode())
