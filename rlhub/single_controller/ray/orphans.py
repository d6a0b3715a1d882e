"""A process that outlives its starter for a moment, to end what that left: `python -I -S orphans.py PID NAME=VALUE FOLDER`.

When process PID has ended, every process is killed whose environment has NAME=VALUE or that writes to a file below FOLDER, and
then this one ends.  A program that is killed cannot end what it started, and Ray's agents, whose cluster has gone, wait a minute
for it to come back; these overwrite their environment by their title, so they are known by their logs.  Only the standard library
is loaded, so that it costs a few megabytes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

LOOK_EVERY_S = 0.5
QUIET_S = 2.0
"""It ends when none was found for so long: what was being started at that moment appears a little later."""
OPEN_FOR_WRITING = 0o200


def left_behind(entry: str, folder: str) -> list[int]:
    """Returns the processes of this machine, but for this one, that have the variable or write below the folder."""
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [pid for pid in others if _carries(pid, entry.encode()) or _writes(pid, folder.rstrip("/") + "/")]


def _carries(pid: int, entry: bytes) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as stream:
        return entry in stream.read().split(b"\0")
    return False


def _writes(pid: int, folder: str) -> bool:
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{number}"
            with suppress(OSError):  # closed since
                if os.readlink(link).startswith(folder) and os.lstat(link).st_mode & OPEN_FOR_WRITING:
                    return True
    return False


def end_left_behind(entry: str, folder: str) -> None:
    """Kills these processes (see `left_behind`) until none was found for QUIET_S."""
    ends = time.monotonic() + QUIET_S
    while time.monotonic() < ends:
        for pid in left_behind(entry, folder):
            ends = time.monotonic() + QUIET_S
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def main(starter: int, entry: str, folder: str) -> None:
    """Waits for the starter's end, then ends all that it left."""
    while os.getppid() == starter:
        time.sleep(LOOK_EVERY_S)
    end_left_behind(entry, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
