"""`AsyncTaskRunner`: many coroutines on one event-loop thread, used from threads and from other event loops.

    runner = AsyncTaskRunner(max_concurrent=256)
    for prompt in prompts:
        runner.submit(episode, prompt)
    for result in runner.wait(len(prompts)):       # Accepted, Rejected, Failed, Cancelled or TimedOut
        ...

Nothing polls: a submission, a result, a cancellation and `resume` each wake exactly those that wait for them.  A wake-up from
another thread costs a system call, so only one is pending at a time, however many tasks are submitted meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from rlhub.errors import DeadlineError
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.aio.results import (
    Accepted,
    Cancelled,
    Failed,
    Reject,
    Rejected,
    ResultQueue,
    TaskResult,
    TimedOut,
    Waiter,
    async_waiter,
    thread_waiter,
)

logger = logging.getLogger(__name__)

_STARTS_PER_TURN = 256
"""Maximum number of tasks that start before the loop does other work; it bounds the latency that a burst of submissions adds."""


class _Entry:
    """A task from its submission to its result."""

    __slots__ = ("args", "cancelled", "deadline_s", "expired", "function", "kwargs", "task", "task_id", "timer")

    def __init__(
        self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any], deadline_s: float | None
    ) -> None:
        self.task_id = ""
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.deadline_s = deadline_s
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.cancelled = False
        self.expired = False


class AsyncTaskRunner:
    """Runs coroutines.  All methods may be called from any thread, except that methods that wait must not be called on the
    runner's own loop.

    max_concurrent: maximum number of tasks that run at the same time; None: no limit.  max_queued: maximum number of tasks that
    wait for their start; `submit` waits for space beyond it.  max_results: maximum number of results that wait for a consumer;
    further ones are kept, but no task starts until some were taken.  on_result: receives each result on the loop's thread, which
    is then not kept for `wait`; it must not block.
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        max_queued: int | None = None,
        max_results: int | None = None,
        on_result: Callable[[TaskResult], None] | None = None,
        name: str = "tasks",
    ) -> None:
        for label, limit in (("max_concurrent", max_concurrent), ("max_queued", max_queued), ("max_results", max_results)):
            if limit is not None and limit < 1:
                raise ValueError(f"{label} of the task runner {name!r} is {limit}; give at least 1, or None for no limit")
        self.name = name
        self._max_concurrent = max_concurrent
        self._max_queued = max_queued
        self.on_result = on_result
        self._numbers = itertools.count()
        self._tasks: dict[str, _Entry] = {}
        self._queue: deque[_Entry] = deque()
        self._num_withdrawn = 0  # tasks of the queue that were cancelled before their start, and reported already
        self._parked: deque[tuple[_Entry, Waiter]] = deque()  # submissions that wait for space in the queue
        self._queue_lock = threading.Lock()
        self._num_running = 0
        self._paused = self._closed = self._pump_due = False
        self._thread = LoopThread(name)
        self._results = ResultQueue(max_results, self._wake)

    # -- state -------------------------------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Returns the event loop of the tasks."""
        return self._thread.loop

    @property
    def num_running(self) -> int:
        """Returns the number of running tasks."""
        return self._num_running

    @property
    def num_queued(self) -> int:
        """Returns the number of tasks that were submitted and have not started, including those that wait in `submit` for
        space."""
        return len(self._queue) + len(self._parked) - self._num_withdrawn

    @property
    def num_ready(self) -> int:
        """Returns the number of results that were not taken yet."""
        return len(self._results)

    @property
    def paused(self) -> bool:
        """Returns whether the runner starts no new tasks."""
        return self._paused

    def ask(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a function on the loop, at once if this is the loop's own thread; returns a future of its result."""
        return self._thread.ask(function, *args)

    # -- submitting --------------------------------------------------------------------------------------------------------

    def submit(
        self,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        task_id: str | None = None,
        deadline: float | None = None,
        **kw: Any,
    ) -> str:
        """Runs `async_fn(*args, **kw)` on the loop in its turn, and returns the task's id.  Waits while the queue is full.

        task_id: must differ from those of all queued and running tasks.  deadline: seconds from the task's start after which it
        is cancelled and ends as TimedOut.
        """
        entry = _Entry(async_fn, args, kw, deadline)
        self._register(entry, task_id)
        if self._max_queued is None:
            self._queue.append(entry)
            if not self._pump_due:
                self._wake()
            return entry.task_id
        if self._thread.is_current and self._is_full():
            self._tasks.pop(entry.task_id)
            raise RuntimeError(f"the queue of {self.name} is full, and its own loop cannot wait for itself; use asubmit here")
        wait, waiter = thread_waiter(1)
        if not self._enqueue(entry, waiter):
            try:
                wait(None)
            except BaseException:  # an interrupt: the caller never learns the id, so the task must not run
                self._take_back(entry)
                raise
            self._check_open()
        return entry.task_id

    async def asubmit(
        self,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        task_id: str | None = None,
        deadline: float | None = None,
        **kw: Any,
    ) -> str:
        """Does the same as `submit` for a caller on any event loop, which continues with other work while the queue is full."""
        entry = _Entry(async_fn, args, kw, deadline)
        self._register(entry, task_id)
        wait, waiter = async_waiter(1)
        if not self._enqueue(entry, waiter):
            try:
                await wait(None)
            except BaseException:
                self._take_back(entry)
                raise
            self._check_open()
        return entry.task_id

    def _register(self, entry: _Entry, task_id: str | None) -> None:
        self._check_open()
        entry.task_id = str(next(self._numbers)) if task_id is None else task_id
        while self._tasks.setdefault(entry.task_id, entry) is not entry:
            if task_id is not None:
                raise ValueError(f"a task {task_id!r} is still queued or running in {self.name}; ids must be unique among these")
            entry.task_id = str(next(self._numbers))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the task runner {self.name} is closed")

    def _is_full(self) -> bool:
        return self._max_queued is not None and len(self._queue) - self._num_withdrawn >= self._max_queued

    def _enqueue(self, entry: _Entry, waiter: Waiter) -> bool:
        """Queues the task, or parks it until there is space and returns False; tasks are queued in the order of their
        submission."""
        with self._queue_lock:
            parked = bool(self._parked) or self._is_full()
            if parked:
                self._parked.append((entry, waiter))
            else:
                self._queue.append(entry)
        self._wake()
        return not parked

    def _take_back(self, entry: _Entry) -> None:
        """Withdraws a task whose submitter was interrupted while it waited for space; a task that was queued meanwhile is
        cancelled."""
        with self._queue_lock:
            parked = [place for place in self._parked if place[0] is entry]
            for place in parked:
                self._parked.remove(place)
                self._tasks.pop(entry.task_id, None)
        if not parked:
            self.cancel(entry.task_id)

    def _admit_parked(self) -> None:
        while self._parked:
            with self._queue_lock:
                if not self._parked or self._is_full():
                    return
                entry, waiter = self._parked.popleft()
                self._queue.append(entry)
            waiter.wake()

    # -- results -----------------------------------------------------------------------------------------------------------

    def wait(self, count: int, timeout: float | None = None) -> list[TaskResult]:
        """Returns exactly `count` results, in the order in which the tasks ended.

        Raises DeadlineError (a TimeoutError) if there are fewer after `timeout` seconds; these stay for the next call.
        Concurrent callers are served in the order of their calls.
        """
        if self._thread.is_current:
            raise RuntimeError(f"the loop of {self.name} would wait for itself; use await_results")
        wait, waiter = thread_waiter(count)
        self._results.enlist(waiter)
        try:
            wait(timeout)
        except BaseException:
            self._results.withdraw(waiter)
            raise
        return self._taken(waiter, timeout)

    async def await_results(self, count: int, timeout: float | None = None) -> list[TaskResult]:
        """Does the same as `wait` for a caller on any event loop."""
        wait, waiter = async_waiter(count)
        self._results.enlist(waiter)
        try:
            await wait(timeout)
        except BaseException:
            self._results.withdraw(waiter)
            raise
        return self._taken(waiter, timeout)

    def poll(self, max_count: int | None = None) -> list[TaskResult]:
        """Returns the results that are available now, at most `max_count`, without waiting."""
        return self._results.take(max_count)

    def _taken(self, waiter: Waiter, timeout: float | None) -> list[TaskResult]:
        found = self._results.collect(waiter)
        if found is not None:
            return found
        have = f"{self.num_ready} of {waiter.count} are there, {self.num_running} tasks run, {self.num_queued} are queued"
        if self._closed:
            raise RuntimeError(f"the task runner {self.name} was closed: {have}")
        raise DeadlineError(f"results of {self.name}", float(timeout or 0.0), have)

    # -- control -----------------------------------------------------------------------------------------------------------

    def cancel(self, task_id: str) -> bool:
        """Cancels a task, which ends as Cancelled unless it catches the cancellation and returns.  Returns False if no such task
        is queued or running."""
        entry = self._tasks.get(task_id)
        if entry is None or self._thread.stopped:
            return False
        self._thread.call(self._cancel, entry)
        return True

    def pause(self) -> None:
        """Starts no new tasks.  Running tasks continue, and results are delivered."""
        self._paused = True

    def resume(self) -> None:
        """Starts queued tasks again."""
        self._paused = False
        self._wake()

    def close(self, deadline_s: float = 10.0) -> None:
        """Cancels all tasks, waits for their end, and ends the loop.  Results can still be taken; waiting for more than there are
        raises an error.  May be called twice."""
        if self._closed and self._thread.stopped:
            return
        self._closed = True
        try:
            self._thread.run(self._end_tasks(deadline_s), timeout=deadline_s + 1.0)
        except TimeoutError:
            logger.warning("the loop of %s does not answer: something blocks its thread", self.name)
        self._results.close()
        self._thread.stop(deadline_s)

    async def _end_tasks(self, deadline_s: float) -> None:
        entries = list(self._tasks.values())
        for entry in entries:
            self._cancel(entry)
        while self._parked:
            self._parked.popleft()[1].wake()
        tasks = [entry.task for entry in entries if entry.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=deadline_s)
            if late:
                logger.warning("%d tasks of %s do not end after their cancellation", len(late), self.name)

    # -- on the loop's thread ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._pump_due and not self._thread.stopped:
            self._pump_due = True
            self._thread.call(self._pump)

    def _pump(self) -> None:
        """Starts the tasks that may start."""
        self._pump_due = False
        self._results.release_surplus()
        limit = self._max_concurrent
        queue = self._queue
        for _ in range(_STARTS_PER_TURN):
            if not queue or self._paused or self._results.is_full or (limit is not None and self._num_running >= limit):
                break
            entry = queue.popleft()
            if self._parked:
                self._admit_parked()
            if entry.cancelled:
                self._num_withdrawn -= 1
            else:
                self._start(entry)
        else:
            self._wake()
        if self._parked:
            self._admit_parked()

    def _start(self, entry: _Entry) -> None:
        self._num_running += 1
        entry.task = asyncio.Task(self._run(entry), loop=self._thread.loop)
        if entry.deadline_s is not None:
            entry.timer = self._thread.loop.call_later(entry.deadline_s, self._expire, entry)

    async def _run(self, entry: _Entry) -> None:
        try:
            value = await entry.function(*entry.args, **entry.kwargs)
        except Reject as signal:
            self._finish(entry, Rejected(task_id=entry.task_id, reason=str(signal)))
        except asyncio.CancelledError:
            if entry.expired:
                self._finish(entry, TimedOut(task_id=entry.task_id, deadline_s=entry.deadline_s or 0.0))
            else:
                self._finish(entry, Cancelled(task_id=entry.task_id))
        except BaseException as error:  # noqa: BLE001 - the boundary of a task: its exit or interrupt must not end the loop
            self._finish(entry, Failed(task_id=entry.task_id, error=error))
        else:
            if value is None:
                self._finish(entry, Rejected(task_id=entry.task_id, reason="the task returned None"))
            else:
                self._finish(entry, Accepted(task_id=entry.task_id, value=value))

    def _finish(self, entry: _Entry, result: TaskResult) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        del self._tasks[entry.task_id]
        self._num_running -= 1
        self._deliver(result)
        if self._queue and not self._pump_due:
            self._wake()

    def _deliver(self, result: TaskResult) -> None:
        if self.on_result is None:
            self._results.put(result)
            return
        try:
            self.on_result(result)
        except Exception:
            logger.exception("on_result of %s failed for task %s", self.name, result.task_id)

    def _cancel(self, entry: _Entry) -> None:
        if self._tasks.get(entry.task_id) is not entry or entry.cancelled:
            return
        if entry.task is not None:
            # After the task's first step, which is in the loop's queue already: cancelled before it, `_run` would never
            # begin, and nothing would report a result.
            self._thread.loop.call_soon(entry.task.cancel)
            return
        entry.cancelled = True
        self._num_withdrawn += 1
        del self._tasks[entry.task_id]
        self._deliver(Cancelled(task_id=entry.task_id))
        if self._parked:
            self._admit_parked()

    def _expire(self, entry: _Entry) -> None:
        if entry.task is not None:
            entry.expired = True
            self._thread.loop.call_soon(entry.task.cancel)  # see `_cancel`: uvloop looks at timers before its queue
