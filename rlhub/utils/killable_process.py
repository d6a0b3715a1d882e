"""One killable child as its driver sees it: spawn, talk without blocking, kill with everything it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO, Any

import psutil

from rlhub.utils.killable_wire import WireError, decode

BOOT = (
    "import json,sys; setup=json.loads(sys.argv[1]); sys.path[:]=setup['sys_path']; "
    "from rlhub.utils.killable_child import main; main(setup)"
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
MAX_UNREAD_BYTES = 1 << 22  # four of the largest replies a child sends; more without a line end is not a child of ours speaking
READ_BYTES = 1 << 16  # the size of a pipe
KILL_ROUNDS = 20
CRASH_TEXT = 1500
EXIT_S = 2.0  # between the closed pipes of a process that ends and its exit code: it needs a core for a moment


@dataclass(slots=True, kw_only=True, eq=False)
class ChildProcess:
    """items: numbers of the calls it has been given and not answered, in order; num_given, given_at: how many it was given last,
    and when; since: when it last got or did something (both monotonic); served: answers given; ready: its function is loaded."""

    process: subprocess.Popen[bytes]
    request_fd: int
    reply_fd: int
    crash_file: IO[bytes]
    since: float = field(default_factory=time.monotonic)
    items: deque[int] = field(default_factory=deque)
    num_given: int = 0
    given_at: float = 0.0
    served: int = 0
    ready: bool = False
    finished: bool = False
    _outgoing: memoryview = field(default_factory=lambda: memoryview(b""))
    _incoming: bytes = b""

    @property
    def idle(self) -> bool:
        return self.ready and not self.items and not self.finished

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing)

    def give(self, items: Iterable[int], line: bytes) -> None:
        """Hand over calls; `line` is written as far as the pipe takes it now, the rest by `write`."""
        self.items.extend(items)
        self._outgoing = memoryview(line)
        self.num_given = len(self.items)
        self.given_at = self.since = time.monotonic()
        self.write()

    def write(self) -> None:
        """Write what the pipe takes; a broken pipe shows up as end of replies."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self.request_fd, self._outgoing) :]
                self.since = time.monotonic()

    def read(self) -> list[dict[str, Any]]:
        """The replies that have arrived.  Sets `finished` at the end of the stream, or on anything that is no reply."""
        try:
            data = os.read(self.reply_fd, READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        self.finished = not data or len(self._incoming) > MAX_UNREAD_BYTES
        self.since = time.monotonic()
        try:
            replies = [decode(line) for line in lines]
        except WireError:
            replies = [None]
        if not all(isinstance(reply, dict) for reply in replies):
            self.finished = True
            return []
        return replies

    def kill(self) -> str:
        """End the child and all its descendants; says how the child ended, with the crash's traceback if there is one."""
        if self.finished:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=EXIT_S)
        ended_before = self.process.poll() is not None
        kill_tree(self.process.pid, self.process)
        code = self.process.wait()
        for fd in (self.request_fd, self.reply_fd):
            os.close(fd)
        with self.crash_file:
            self.crash_file.seek(0)
            crash = self.crash_file.read(CRASH_TEXT).decode(errors="replace").strip()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return (f"ended with {how}" if ended_before else "closed its pipes") + (f"\n{crash}" if crash else "")


def spawn(target: str, parameters: Iterable[str], *, timeout_s: float, memory_gb: float) -> ChildProcess:
    """Start a child for `target`; it will send `ready` or `load_error`."""
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    crash_file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ChildProcess.kill
    setup = {
        "sys_path": sys.path,
        "target": target,
        "parameters": list(parameters),
        "timeout_s": timeout_s,
        "memory_bytes": int(memory_gb * 2**30),
        "request_fd": request_read,
        "reply_fd": reply_write,
        "crash_fd": crash_file.fileno(),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT, json.dumps(setup)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(request_read, reply_write, crash_file.fileno()),
        start_new_session=True,
        env={**dict.fromkeys(THREAD_VARIABLES, "1"), **os.environ},
    )
    os.close(request_read)
    os.close(reply_write)
    os.set_blocking(request_write, False)
    os.set_blocking(reply_read, False)
    return ChildProcess(process=process, request_fd=request_write, reply_fd=reply_read, crash_file=crash_file)


def kill_tree(pid: int, process: subprocess.Popen[bytes]) -> None:
    """SIGKILL `pid`, its session's processes and its descendants.

    The child is stopped first and killed last: while it lives, orphans of its descendants become its own children
    (subreaper) and so cannot hide, and it starts no new ones.
    """
    process.send_signal(signal.SIGSTOP)  # does nothing once the child has been waited for
    for _ in range(KILL_ROUNDS):
        living = _living_descendants(pid)
        if not living:
            break
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            for descendant in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendant.send_signal(sign)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    process.kill()


def _living_descendants(pid: int) -> list[psutil.Process]:
    living = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if descendant.status() != psutil.STATUS_ZOMBIE:
                    living.append(descendant)
    return living
