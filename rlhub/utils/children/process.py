"""One child as its driver sees it: starts it, communicates without blocking, and kills it with everything that it has started.

The containment that this machine allows is determined once, by trying it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from rlhub.utils.children.access import Access
from rlhub.utils.children.launch import Launch
from rlhub.utils.children.wire import WireError, decode, encode

logger = logging.getLogger(__name__)
BOOT = (
    "import json,sys; setup=json.loads(sys.argv[1]); "
    "sys.path[:]=setup['sys_path'] or [*filter(None,sys.path),setup['rlhub_root']]; "
    "from rlhub.utils.children.child import main; main(setup)"
)
LOAD_TIMEOUT_S = 120.0  # imports of a large library on a busy machine
PROBE = (
    "import os,sys; sys.path[:]=sys.argv[1:]; from rlhub.utils.children.supervisor import become_child; "
    "become_child(os.pipe()[0], (), namespace=True); os._exit(0)"
)
PROBE_S = 60.0
MAX_UNREAD_BYTES = 1 << 22  # four of the largest replies a child sends; more without a line end is not a child of ours speaking
READ_BYTES = 1 << 16  # the size of a pipe
CRASH_TEXT = 1500
EXIT_S = 10.0  # between the closed pipes of a process that ends and its exit code: all that it has started is ended before
KILL_S = 10.0  # for the end of everything that a child has started
SIGNAL_BASE = 128  # see supervisor.py
RLHUB_ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(slots=True, kw_only=True, eq=False)
class ChildProcess:
    """A child and its pipes.

    items: the numbers of the calls that it has and has not answered, in order.  num_given, given_at: size and time of its last
    chunk.  since: when it last received or did something (times are monotonic).  served: the number of answers.  ready: its
    function is loaded.  pid: its process number as the code inside sees it.  strayed: it sent an answer that does not belong to
    its call.
    """

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
    strayed: bool = False
    pid: int = 0
    _nonce: str = ""
    _answered: int = 0
    _imports: int = 0
    _import_began: float = 0.0
    _import_s: float = 0.0
    _outgoing: memoryview = field(default_factory=lambda: memoryview(b""))
    _incoming: bytes = b""

    @property
    def idle(self) -> bool:
        """Returns whether it can take calls now."""
        return self.ready and not self.items and not self.finished

    @property
    def wants_write(self) -> bool:
        """Returns whether part of a request is not written yet."""
        return bool(self._outgoing)

    def deadline(self, timeout_s: float) -> float:
        """Returns the monotonic time of its deadline: for the current call, which may take `timeout_s`, or for loading its
        function.  The imports of a call count as loading, all of them together, since a new child may import in its first
        call."""
        if not self.ready:
            return self.since + LOAD_TIMEOUT_S
        late = self.since + timeout_s
        return max(late, self._import_began + LOAD_TIMEOUT_S - self._import_s) if self._imports else late

    def give(self, items: Iterable[int], request: ChildRequest) -> None:
        """Hands calls over.  The request is written as far as the pipe takes it now; `write` writes the rest."""
        self.items.extend(items)
        self._nonce, self._answered, self._imports = request.nonce, 0, 0
        self._outgoing = memoryview(request.line)
        self.num_given = len(self.items)
        self.given_at = self.since = time.monotonic()
        self.write()

    def write(self) -> None:
        """Writes as much as the pipe takes; a broken pipe shows up as the end of the replies."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self.request_fd, self._outgoing) :]
                self.since = time.monotonic()

    def read(self) -> list[dict[str, Any]]:
        """Returns the answers that have arrived.  Sets `finished` at the end of the stream, or if something other than the next
        answer arrives."""
        try:
            data = os.read(self.reply_fd, READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        self.finished = not data or len(self._incoming) > MAX_UNREAD_BYTES
        answers = []
        for line in lines:
            reply = _decoded(line)
            if self.ready and "importing" in reply:
                self._note_import(reply)
            elif self._is_next(reply):
                self.since = time.monotonic()
                answers.append(reply)
            else:
                self.finished = self.strayed = True
                break
        return answers

    def host_pid(self) -> int:
        """Returns the child's process number outside of its namespace; its supervisor's is `process.pid`."""
        return int(psutil.Process(self.process.pid).children()[0].pid)

    def kill(self) -> str:
        """Ends the child and all its descendants; returns how the child ended, with the crash's traceback if there is one."""
        if self.finished and not self.strayed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=EXIT_S)
        ended_before = self.process.poll() is not None
        code = self._end()
        for fd in (self.request_fd, self.reply_fd):
            os.close(fd)
        with self.crash_file:
            self.crash_file.seek(0)
            crash = self.crash_file.read(CRASH_TEXT).decode(errors="replace").strip()
        if self.strayed:
            return "sent an answer that is not the one to this call"
        number = -code if code < 0 else code - SIGNAL_BASE
        known = number in signal.valid_signals()
        how = f"signal {signal.Signals(number).name}" if known else f"exit code {code}"
        return (f"ended with {how}" if ended_before else "closed its pipes") + (f"\n{crash}" if crash else "")

    def _is_next(self, reply: dict[str, Any]) -> bool:
        """Returns whether this is the expected reply, and counts it if so."""
        if not self.ready:
            self.ready, self.pid = "ready" in reply, reply.get("ready", 0)
            return self.ready or "load_error" in reply
        if reply.get("id") != f"{self._nonce}.{self._answered}":
            return False
        self._answered += 1
        self._imports = 0
        return True

    def _note_import(self, note: dict[str, Any]) -> None:
        """Records that an outermost import begins or ends.  Notes of a thread that an earlier call left behind are ignored."""
        now = time.monotonic()
        if note.get("id") != f"{self._nonce}.{self._answered}":
            return
        if note["importing"]:
            self._import_began = self._import_began if self._imports else now
            self._imports += 1
        elif self._imports:
            self._imports -= 1
            if not self._imports:
                self._import_s += now - self._import_began
                self.since += now - self._import_began

    def _end(self) -> int:
        """Ends the supervisor with everything below it, and returns its exit code."""
        for sign in (signal.SIGTERM, signal.SIGCONT):  # it may be stopped
            self.process.send_signal(sign)
        try:
            return self.process.wait(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            logger.warning("what a child process has started was not ended after %g s; its supervisor is killed", KILL_S)
            self.process.kill()
            return self.process.wait()


@dataclass(frozen=True, slots=True)
class ChildRequest:
    """Calls in the form in which a child reads them.  nonce: part of the answers; code that has not read the request cannot guess
    it."""

    nonce: str
    line: bytes

    @classmethod
    def of(cls, calls: Sequence[Mapping[str, Any]]) -> ChildRequest:
        """Returns the request of these calls.  Raises WireError if an argument has no JSON form."""
        nonce = secrets.token_hex(8)
        return cls(nonce, encode({"id": nonce, "calls": list(calls)}))


def spawn(
    target: str, parameters: Iterable[str], *, memory_gb: float, access: Access, launch: Launch | None = None
) -> ChildProcess:
    """Starts a child for `target`, which will send `ready` or `load_error`.  Raises the ConfigError of `Access.variables`."""
    launch = launch or Launch()
    variables, namespace = launch.environment(access.variables()), namespaces_allowed()
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    crash_file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ChildProcess.kill
    setup = {
        "sys_path": [] if launch.python else sys.path,
        "rlhub_root": RLHUB_ROOT,
        "cpus": launch.cpus,
        "memory_kind": launch.memory_kind,
        "target": target,
        "parameters": list(parameters),
        "memory_bytes": int(memory_gb * 2**30),
        "request_fd": request_read,
        "reply_fd": reply_write,
        "crash_fd": crash_file.fileno(),
        "namespace": namespace,
        "untrusted": access.untrusted,
    }
    process = subprocess.Popen(
        [launch.python or sys.executable, "-c", BOOT, json.dumps(setup)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(request_read, reply_write, crash_file.fileno()),
        start_new_session=True,
        env=variables,
    )
    os.close(request_read)
    os.close(reply_write)
    os.set_blocking(request_write, False)
    os.set_blocking(reply_read, False)
    return ChildProcess(process=process, request_fd=request_write, reply_fd=reply_read, crash_file=crash_file)


@functools.cache
def namespaces_allowed() -> bool:
    """Returns whether children can live in PID namespaces of their own.  If not, the log says what that means."""
    allowed, why = sys.platform == "linux", "only Linux has them"
    if allowed:
        try:
            done = subprocess.run([sys.executable, "-c", PROBE, *sys.path], capture_output=True, timeout=PROBE_S, check=False)
            allowed, why = done.returncode == 0, done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        except subprocess.TimeoutExpired:
            allowed, why = False, f"not done after {PROBE_S:g} s"
    if not allowed:
        logger.warning(
            "processes that reward functions, tools and environments start are ended with them, but not contained: PID "
            "namespaces are not allowed here (%s), so code that means to can escape, and can look at this user's processes. "
            "Run where unprivileged user namespaces or CAP_SYS_ADMIN are allowed, or only code that you trust.",
            why or "the attempt failed",
        )
    return allowed


def _decoded(line: bytes) -> dict[str, Any]:
    """Returns the reply in a line, or {} for anything but a JSON object; {} is never the expected reply."""
    with contextlib.suppress(WireError):
        reply = decode(line)
        if isinstance(reply, dict):
            return reply
    return {}
