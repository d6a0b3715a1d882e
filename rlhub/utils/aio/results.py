"""The results of asynchronous tasks, and a queue that passes them from an event loop to waiting threads and coroutines of other
loops.

There is one type for each way in which a task can end, so that no task ends as None or gets lost.  A waiter requests a number of
results and gets all of them or none, so a passed time limit loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class Accepted:
    """The task returned `value`."""

    task_id: str
    value: Any


@dataclass(slots=True, kw_only=True, frozen=True)
class Rejected:
    """The task decided that its value must not be used: it returned None or raised `Reject`."""

    task_id: str
    reason: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Failed:
    """The task raised `error`."""

    task_id: str
    error: BaseException


@dataclass(slots=True, kw_only=True, frozen=True)
class Cancelled:
    """The task was cancelled before its end."""

    task_id: str


@dataclass(slots=True, kw_only=True, frozen=True)
class TimedOut:
    """The task was cancelled because its deadline, `deadline_s` seconds after its start, had passed."""

    task_id: str
    deadline_s: float


TaskResult = Accepted | Rejected | Failed | Cancelled | TimedOut


class Reject(Exception):  # noqa: N818  a signal, not an error
    """Raised in a task to end it as Rejected, with this reason."""


class Waiter:
    """A wait for `count` results.  wake: lets the waiting side continue; it may be called from any thread."""

    __slots__ = ("count", "results", "wake")

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        if count < 0:
            raise ValueError(f"cannot wait for {count} results; ask for 0 or more")
        self.count = count
        self.wake = wake
        self.results: list[TaskResult] | None = None


def thread_waiter(count: int) -> tuple[Callable[[float | None], object], Waiter]:
    """Returns, for a thread, a function that waits at most a given number of seconds, and the waiter."""
    event = threading.Event()
    return event.wait, Waiter(count, event.set)


def async_waiter(count: int) -> tuple[Callable[[float | None], Awaitable[object]], Waiter]:
    """Returns, for a coroutine, a function to await that waits at most a given number of seconds, and the waiter."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not woken.done():
            woken.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:
            logger.warning("the event loop that waited for results is closed")

    async def wait(timeout: float | None) -> None:
        await asyncio.wait((woken,), timeout=timeout)

    return wait, Waiter(count, wake)


class ResultQueue:
    """Keeps results until they are consumed.  `put` and `release_surplus` belong to one thread; the other methods may be called
    from any.

    max_results: results beyond this number are kept as a surplus, and `is_full` says that no more should be produced.  on_space:
    called after results were taken, if a maximum is set.
    """

    def __init__(self, max_results: int | None, on_space: Callable[[], None]) -> None:
        self._max_results = max_results
        self._on_space = on_space
        self._ready: deque[TaskResult] = deque()
        self._surplus: deque[TaskResult] = deque()
        self._waiters: deque[Waiter] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._ready) + len(self._surplus)

    @property
    def is_full(self) -> bool:
        """Returns whether the maximum is reached, so that further results would be surplus."""
        return self._max_results is not None and len(self._ready) >= self._limit(self._max_results)

    def put(self, result: TaskResult) -> None:
        """Adds a result; never waits and never fails."""
        if self._max_results is not None and (self._surplus or self.is_full):
            self._surplus.append(result)
            return
        self._ready.append(result)
        if self._waiters:
            self._serve()

    def release_surplus(self) -> None:
        """Makes surplus results available to consumers, as far as the maximum permits."""
        while self._surplus and not self.is_full:
            self._ready.append(self._surplus.popleft())
            if self._waiters:
                self._serve()

    def enlist(self, waiter: Waiter) -> None:
        """Queues a waiter, which is served in its turn when there are enough results."""
        self._waiters.append(waiter)
        self._serve()
        self._report_space()
        if self._closed:
            waiter.wake()

    def collect(self, waiter: Waiter) -> list[TaskResult] | None:
        """Returns the results of the waiter, or None if it was not served; then it no longer waits."""
        with self._lock:
            if waiter.results is None:
                self._forget(waiter)
        return waiter.results

    def withdraw(self, waiter: Waiter) -> None:
        """Removes a waiter that left without collecting, and puts its results back to the front of the queue."""
        with self._lock:
            self._forget(waiter)
            self._ready.extendleft(reversed(waiter.results or ()))
        self._serve()

    def take(self, max_count: int | None) -> list[TaskResult]:
        """Returns at most `max_count` results at once."""
        with self._lock:
            count = len(self._ready) if max_count is None else min(max_count, len(self._ready))
            taken = [self._ready.popleft() for _ in range(count)]
        self._report_space()
        return taken

    def close(self) -> None:
        """Ends the queue: the surplus becomes available, and waiters that request more results than there are wake up without
        any."""
        self._closed = True
        self._max_results = None
        self._ready.extend(self._surplus)
        self._surplus.clear()
        self._serve()
        with self._lock:
            waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            waiter.wake()

    def _limit(self, max_results: int) -> int:
        """Returns the limit on waiting results; a waiter that requests more than the maximum must still be served."""
        try:
            return max(max_results, self._waiters[0].count)
        except IndexError:
            return max_results

    def _serve(self) -> None:
        served = False
        with self._lock:
            while self._waiters and len(self._ready) >= self._waiters[0].count:
                waiter = self._waiters.popleft()
                waiter.results = [self._ready.popleft() for _ in range(waiter.count)]
                waiter.wake()
                served = True
        if served:
            self._report_space()

    def _forget(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _report_space(self) -> None:
        if self._max_results is not None:
            self._on_space()
