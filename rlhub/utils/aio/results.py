"""How asynchronous tasks ended, one type for each way, and their way to those who wait, in threads and on other event loops.

Nothing ends as None or gets lost.  A waiter asks for a number of results and gets all of them or none, so a time limit that
passes loses nothing.
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
    """The task decided that its result must not be used: it returned None or raised `Reject`."""

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


Outcome = Accepted | Rejected | Failed | Cancelled | TimedOut


class Reject(Exception):  # noqa: N818  a signal, not an error
    """Raised in a task to end it as Rejected with this reason."""


class Waiter:
    """Somebody who waits for `count` outcomes.  wake: lets the waiting side go on; may be called from any thread."""

    __slots__ = ("count", "outcomes", "wake")

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        if count < 0:
            raise ValueError(f"cannot wait for {count} outcomes; ask for 0 or more")
        self.count = count
        self.wake = wake
        self.outcomes: list[Outcome] | None = None


def thread_waiter(count: int) -> tuple[Callable[[float | None], object], Waiter]:
    """For a plain thread: what to call to wait at most so many seconds, and the waiter."""
    event = threading.Event()
    return event.wait, Waiter(count, event.set)


def async_waiter(count: int) -> tuple[Callable[[float | None], Awaitable[object]], Waiter]:
    """For a coroutine: what to await to wait at most so many seconds, and the waiter."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not woken.done():
            woken.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:
            logger.warning("the event loop that waited for outcomes is closed")

    async def wait(timeout: float | None) -> None:
        await asyncio.wait((woken,), timeout=timeout)

    return wait, Waiter(count, wake)


class OutcomeQueue:
    """`put` and `release_held` on one thread, the rest from any.

    max_results: outcomes beyond it are held: kept, but `is_full` says that no more should be made.
    on_room: called after outcomes were taken, where a maximum is set.
    """

    def __init__(self, max_results: int | None, on_room: Callable[[], None]) -> None:
        self._max_results = max_results
        self._on_room = on_room
        self._ready: deque[Outcome] = deque()
        self._held: deque[Outcome] = deque()
        self._waiters: deque[Waiter] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._ready) + len(self._held)

    @property
    def is_full(self) -> bool:
        """Whether the maximum is reached: what is made now would have to be held."""
        return self._max_results is not None and len(self._ready) >= self._limit(self._max_results)

    def put(self, outcome: Outcome) -> None:
        """Add one; never waits and never fails."""
        if self._max_results is not None and (self._held or self.is_full):
            self._held.append(outcome)
            return
        self._ready.append(outcome)
        if self._waiters:
            self._serve()

    def release_held(self) -> None:
        """Move what was held to where there is room now."""
        while self._held and not self.is_full:
            self._ready.append(self._held.popleft())
            if self._waiters:
                self._serve()

    def enlist(self, waiter: Waiter) -> None:
        """Serve this waiter when it is its turn and there is enough."""
        self._waiters.append(waiter)
        self._serve()
        self._tell_room()
        if self._closed:
            waiter.wake()

    def collect(self, waiter: Waiter) -> list[Outcome] | None:
        """What the waiter was given; None where it was not served, and no longer waits then."""
        with self._lock:
            if waiter.outcomes is None:
                self._forget(waiter)
        return waiter.outcomes

    def withdraw(self, waiter: Waiter) -> None:
        """The waiter went away without collecting: what it was given comes first again."""
        with self._lock:
            self._forget(waiter)
            self._ready.extendleft(reversed(waiter.outcomes or ()))
        self._serve()

    def take(self, max_count: int | None) -> list[Outcome]:
        """At most so many, at once."""
        with self._lock:
            count = len(self._ready) if max_count is None else min(max_count, len(self._ready))
            taken = [self._ready.popleft() for _ in range(count)]
        self._tell_room()
        return taken

    def close(self) -> None:
        """Nothing will be put any more: hold nothing back, and let those go who wait for more than there is."""
        self._closed = True
        self._max_results = None
        self._ready.extend(self._held)
        self._held.clear()
        self._serve()
        with self._lock:
            waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            waiter.wake()

    def _limit(self, max_results: int) -> int:
        """A waiter that wants more than the maximum must still be served."""
        try:
            return max(max_results, self._waiters[0].count)
        except IndexError:
            return max_results

    def _serve(self) -> None:
        served = False
        with self._lock:
            while self._waiters and len(self._ready) >= self._waiters[0].count:
                waiter = self._waiters.popleft()
                waiter.outcomes = [self._ready.popleft() for _ in range(waiter.count)]
                waiter.wake()
                served = True
        if served:
            self._tell_room()

    def _forget(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _tell_room(self) -> None:
        if self._max_results is not None:
            self._on_room()
