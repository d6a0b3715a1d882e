"""A pool of child processes for functions that may raise, hang, crash, use up all memory or print without end.

A function is named, never pickled: `"/path/to/file.py:name"` or `"package.module:name"`.  Arguments and results travel as JSON.
Children persist and get calls in batches, so that 256 trivial calls cost milliseconds.  Each call has its own deadline, after
which its child is killed with all its descendants, and a new one takes the remaining calls.

`multiprocessing` and `concurrent.futures` are no alternative: they pickle, fork a threaded driver or import its main module, and
one dead worker breaks their whole pool.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.errors import LoadError
from rlhub.utils.children.access import Access
from rlhub.utils.children.process import LOAD_TIMEOUT_S, ChildProcess, ChildRequest, spawn
from rlhub.utils.children.wire import WireError

FailureKind = Literal["raised", "timeout", "died", "memory", "bad_argument", "bad_result", "skipped"]
GROW_AFTER_S = 0.1  # about twice the start of a child: less work than that is done sooner by the children there are
GATHER_S = (
    0.0005  # after a first reply, before reading: trivial calls answer by the dozen, and each wake-up costs more than a call
)
WAKE_S = 1.0  # a `map` that waits sees at least so often that the pool is closed
MAX_LOADS = 3  # failed ones in a row of a function that could be loaded before
MAX_CHUNK = 256
TRIVIAL_CHUNK, TRIVIAL_CHUNK_S = 32, 0.002  # so many calls at once, if they are done so soon: a round trip takes half as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why a call has no value.

    raised: the function raised an error (`message` is its traceback).  timeout: the deadline passed.  died: its process ended,
    twice.  memory: it exceeded the limit.  bad_argument, bad_result: JSON cannot represent the value.  skipped: not executed,
    because too many other calls had failed.
    """

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The value of a call, or its failure."""

    value: Any = None
    failure: Failure | None = None


@dataclass(slots=True, kw_only=True)
class _MapRun:
    """The state of one `map`: the calls, those not handed out yet, those to repeat, and the results.

    call_s: the time per call of the chunk that was answered last, including its round trip.  failed_loads: the number since the
    last answer.
    """

    calls: Sequence[Mapping[str, Any]]
    pending: deque[int]
    max_failures: int
    num_failures: int = 0
    results: dict[int, CallResult] = field(default_factory=dict)
    retries: deque[int] = field(default_factory=deque)
    retried: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    call_s: float = math.inf
    failed_loads: int = 0

    @property
    def unfinished(self) -> bool:
        """Returns whether calls remain to be done."""
        return len(self.results) < len(self.calls) and self.num_failures <= self.max_failures

    def fail(self, number: int, kind: FailureKind, message: str) -> None:
        """Records a failed call."""
        self.results[number] = CallResult(failure=Failure(kind=kind, message=message))
        self.num_failures += 1

    def request(self, numbers: list[int]) -> tuple[list[int], ChildRequest | None]:
        """Returns the calls that can be sent and their request.  Calls that cannot be sent are recorded as failed."""
        try:
            return numbers, ChildRequest.of([dict(self.calls[number]) for number in numbers])
        except WireError as error:
            if len(numbers) == 1:
                self.fail(numbers[0], "bad_argument", str(error))
                return [], None
        sendable = [number for number in numbers if self.request([number])[0]]
        return (sendable, self.request(sendable)[1]) if sendable else ([], None)


def default_num_workers() -> int:
    """Returns the children of a pool on this machine for which no number is set."""
    return min(4, os.cpu_count() or 1)


class KillablePool:
    """Runs `target(**call)` in children for each call of `map`.  It may be used from several threads; one `map` runs at a
    time."""

    def __init__(
        self,
        target: str,
        parameters: Iterable[str],
        *,
        num_workers: int | None = None,
        timeout_s: float = 30.0,
        memory_gb: float = 4.0,
        access: Access | None = None,
    ) -> None:
        """Creates a pool without children.  parameters: the keywords of every call.  timeout_s: time limit of one call, without
        the time in which it imports.  memory_gb: address space of one child, in GiB. access: the environment variables that the
        function may read."""
        self.target, self.parameters, self.access = target, tuple(parameters), access or Access()
        self.num_workers = num_workers or default_num_workers()
        self.timeout_s, self.memory_gb = timeout_s, memory_gb
        self._children: list[ChildProcess] = []
        self._loaded = False
        self._run_now: _MapRun | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._children)

    def start(self) -> None:
        """Starts the first child and waits until its function is loaded.  Raises LoadError."""
        self.map([])

    def map(self, calls: Sequence[Mapping[str, Any]], *, max_failures: int | None = None) -> list[CallResult]:
        """Returns the result of every call, in order.  It blocks, and returns however the function behaves.  Raises LoadError.

        max_failures: after more failures than this, all unanswered calls are skipped, so that a function which always hangs costs
        a few deadlines and not one per call.
        """
        most = len(calls) if max_failures is None else max_failures
        run = _MapRun(calls=calls, pending=deque(range(len(calls))), max_failures=most)
        with self._lock:
            self._run_now = run
            if self._closed:  # looked at once `close` can see the run
                run.max_failures = -1
            try:
                self._run(run)
            except BaseException:  # re-raised: an interrupted run must not leave children whose answers would be taken for others
                _kill_all(self._children)
                raise
        why = "the pool was closed" if self._closed else f"{run.num_failures} other calls had failed"
        skipped = CallResult(failure=Failure(kind="skipped", message=why))
        return [run.results.get(number, skipped) for number in range(len(calls))]

    def close(self) -> None:
        """Ends all children; a `map` of another thread skips the calls that are not done, and a later one all of them."""
        self._closed = True
        if self._run_now is not None:
            self._run_now.max_failures = -1
        with self._lock:
            _kill_all(self._children)

    def _run(self, run: _MapRun) -> None:
        for child in [child for child in self._children if child.process.poll() is not None]:
            self._discard(child)  # it died idle, by no fault of a call
        while run.unfinished or not (run.calls or self._closed or any(child.ready for child in self._children)):
            self._grow(run)
            self._feed(run)
            now = time.monotonic()  # a reply that is there by now is read, however long this thread then waits for a core
            self._pump(run, self._patience(run))
            for child in list(self._children):
                self._settle(run, child, now)
        for child in [child for child in self._children if child.items]:
            self._discard(child)  # at work on calls that are skipped

    def _grow(self, run: _MapRun) -> None:
        """Starts the first child, then one for every call that needs a new child, and others while the work takes longer than a
        child's start."""
        fresh = sum(1 for child in self._children if not child.served and not child.items)
        starting = any(not child.ready for child in self._children)
        slow = bool(run.pending) and not starting and time.monotonic() - run.began > GROW_AFTER_S
        wanted = not self._children or len(run.retries) > fresh or slow
        hopeless = run.failed_loads >= MAX_LOADS and bool(self._children)
        if wanted and not hopeless and len(self._children) < self.num_workers:
            self._children.append(spawn(self.target, self.parameters, memory_gb=self.memory_gb, access=self.access))

    def _feed(self, run: _MapRun) -> None:
        """Gives every idle child a chunk of calls: large chunks first and smaller ones towards the end, so that all children end
        together; but never a chunk that is done at once."""
        for child in self._children:
            if not child.idle:
                continue
            if run.retries and not child.served:
                chunk = [run.retries.popleft()]
            else:
                chunk = [run.pending.popleft() for _ in range(self._chunk_size(run))]
            sendable, request = run.request(chunk) if chunk else ([], None)
            if request is not None:
                child.give(sendable, request)

    def _chunk_size(self, run: _MapRun) -> int:
        left = len(run.pending)
        shares = 1 if self.num_workers == 1 else 2 * self.num_workers
        least = min(TRIVIAL_CHUNK, int(TRIVIAL_CHUNK_S / run.call_s))
        return min(MAX_CHUNK, left, max(-(-left // shares), least))

    def _patience(self, run: _MapRun) -> float:
        """Returns the seconds until an action without a reply may be due."""
        now = time.monotonic()
        limits = [self._deadline(child) - now for child in self._children if child.items or not child.ready]
        if run.pending and len(self._children) < self.num_workers and all(child.ready for child in self._children):
            limits.append(run.began + GROW_AFTER_S - now)
        return max(0.0, min(WAKE_S, *limits)) if limits else 0.0

    def _deadline(self, child: ChildProcess) -> float:
        return child.deadline(self.timeout_s)

    def _pump(self, run: _MapRun, timeout_s: float) -> None:
        """Waits for the pipes, then writes and reads as much as they take and have."""
        poller = select.poll()  # not select.select: a driver may have more than 1024 open files
        owners = {}
        for child in self._children:
            owners[child.reply_fd] = child
            poller.register(child.reply_fd, select.POLLIN)
            if child.wants_write:
                owners[child.request_fd] = child
                poller.register(child.request_fd, select.POLLOUT)
        events = poller.poll(timeout_s * 1000)
        if events:
            time.sleep(GATHER_S)
        for fd, _ in events:
            child = owners[fd]
            if fd == child.request_fd:
                child.write()
                continue
            for reply in child.read():
                self._accept(run, child, reply)

    def _accept(self, run: _MapRun, child: ChildProcess, reply: dict[str, Any]) -> None:
        if "load_error" in reply:
            self._discard(child)
            self._load_failed(run, reply["load_error"])
        elif "ready" in reply:
            self._loaded = True
        elif not child.items:
            child.finished = True
        elif reply.get("failed") == "memory":
            child.finished = True
            self._second_chance(run, child, "memory", f"used more than {self.memory_gb:g} GiB")
            _take_back(run, child)
        else:
            number = child.items.popleft()
            child.served += 1
            run.failed_loads = 0
            if "failed" in reply:
                run.fail(number, reply["failed"], reply["message"] + self.access.hint(reply["message"]))
            else:
                run.results[number] = CallResult(value=reply.get("value"))
            if not child.items:
                run.call_s = (time.monotonic() - child.given_at) / child.num_given

    def _settle(self, run: _MapRun, child: ChildProcess, now: float) -> None:
        """Removes a child that has ended or was past its deadline at `now`, and settles the calls that it had."""
        late = (child.items or not child.ready) and now > self._deadline(child)
        if not (child.finished or late):
            return
        how = self._discard(child)
        if not child.ready:
            self._load_failed(run, f"not done after {LOAD_TIMEOUT_S:g} s" if late else f"the process {how}")
        elif child.items and late and not child.finished:
            run.fail(child.items.popleft(), "timeout", f"not done after {self.timeout_s:g} s")
        elif child.items:
            self._second_chance(run, child, "died", f"its process {how}")
        _take_back(run, child)

    def _load_failed(self, run: _MapRun, why: str) -> None:
        """Raises LoadError if the function has never been loaded.  A function that has been is loaded again a few times, because
        the cause may be outside of it (memory, a file server); after that, the calls fail that no other child can take."""
        run.failed_loads += 1
        if self._loaded and run.failed_loads < MAX_LOADS:
            return
        message = f"cannot load {self.target}:{' ' if len(why.splitlines()) == 1 else chr(10)}{why}{self.access.hint(why)}"
        if not self._loaded or not run.calls:
            raise LoadError(message)
        others = any(child.ready and not child.finished for child in self._children)
        for waiting in (run.retries,) if others else (run.retries, run.pending):
            while waiting:
                run.fail(waiting.popleft(), "died", f"{message}\n(it could be loaded before, and not the last {MAX_LOADS} times)")

    def _second_chance(self, run: _MapRun, child: ChildProcess, kind: FailureKind, message: str) -> None:
        """Repeats the current call once, as the first one of a new child: the death of a process may be the fault of an earlier
        call (a leak, a damaged heap) or of none."""
        number = child.items.popleft()
        if number in run.retried:
            run.fail(number, kind, message)
            return
        run.retried.add(number)
        run.retries.append(number)

    def _discard(self, child: ChildProcess) -> str:
        self._children.remove(child)
        return child.kill()


def _take_back(run: _MapRun, child: ChildProcess) -> None:
    """Puts the calls that an ended child has not begun back to the front of the queue."""
    run.pending.extendleft(reversed(child.items))
    child.items.clear()


def _kill_all(children: list[ChildProcess]) -> None:
    """Kills all children, at garbage collection and interpreter exit too.  Idle children have no state to lose."""
    while children:
        children.pop().kill()
