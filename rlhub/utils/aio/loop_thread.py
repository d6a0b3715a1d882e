"""`LoopThread`: an event loop on a thread of its own.  Only this module knows uvloop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop of uvloop if it is installed (it switches tasks in about half the time), otherwise of asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """Runs `loop` from construction until `stop`.  The thread is a daemon, so it never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Returns whether the caller runs on this loop's thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def stopped(self) -> bool:
        """Returns whether the loop or its thread has ended."""
        return self.loop.is_closed() or not self._thread.is_alive()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Schedules a function on the loop, from any thread."""
        if self.is_current:
            self.loop.call_soon(function, *args)
        else:
            self.loop.call_soon_threadsafe(function, *args)

    def ask(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a function on the loop, at once if this is the loop's own thread; returns a future of its result."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001  handed to the thread that asked
                answer.set_exception(error)

        if self.is_current:
            run()
        else:
            self.loop.call_soon_threadsafe(run)
        return answer

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Runs a coroutine to its end and returns its result.  The calling thread, which must not be the loop's, waits."""
        if self.is_current:
            coroutine.close()
            raise RuntimeError(f"the loop of {self.name} would wait for itself; await the coroutine instead")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def stop(self, deadline_s: float = 5.0) -> None:
        """Cancels running tasks and ends the loop and the thread.  May be called twice."""
        if self.stopped:
            return
        if self.is_current:
            raise RuntimeError(f"the loop of {self.name} cannot be stopped from its own thread")
        try:
            self.run(_cancel_others(deadline_s), timeout=deadline_s + 1.0)
        except TimeoutError:
            logger.warning("the loop of %s does not answer: something blocks its thread", self.name)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=deadline_s)

    def stop_soon(self) -> None:
        """Does the same as `stop` without waiting, from any thread."""
        if not self.stopped:
            self.call(self._stop_itself)

    def _stop_itself(self) -> None:
        ending = self.loop.create_task(_cancel_others(1.0))
        ending.add_done_callback(lambda _: self.loop.stop())

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(_cancel_others(1.0))  # what was sent while the loop was ending
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


async def _cancel_others(deadline_s: float) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        _, late = await asyncio.wait(others, timeout=deadline_s)
        for task in late:
            logger.warning("a task does not end after its cancellation: %r", task)
