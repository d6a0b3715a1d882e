"""An AsyncActor in this process: its object lives on the event loop of a thread of its own.

Arguments and results are passed as they are, not copied.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from rlhub.errors import DeadlineError, WorkerDiedError
from rlhub.single_controller.async_actor import AsyncActorOptions
from rlhub.single_controller.hosted import HostedObject
from rlhub.single_controller.invoke import RemoteError
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext
from rlhub.utils.aio.loop_thread import LoopThread


class _Call:
    """One call, on its way from the loop of who calls to the actor's and back: each way is one message between the threads.

    A concurrent.futures.Future in between (asyncio.run_coroutine_threadsafe) costs a lock and a chain of callbacks on both
    sides, several times what a short method takes.
    """

    __slots__ = ("caller", "ended", "expired", "loop", "task", "work")

    def __init__(self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work, self.loop = work, loop
        self.caller = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.caller.create_future()
        self.task: asyncio.Task[Any] | None = None
        self.expired = False

    def send(self) -> bool:
        """False if the actor's loop was closed a moment ago."""
        try:
            self.loop.call_soon_threadsafe(self._start)
        except RuntimeError:
            self.work.close()
            return False
        return True

    def cancel(self) -> None:
        """Whoever called waits no longer."""
        with suppress(RuntimeError):  # the loop is closed: nothing runs there
            self.loop.call_soon_threadsafe(self._cancel)

    def expire(self) -> None:
        """The time is over."""
        if not self.ended.done():
            self.expired = True
            self.ended.set_result(None)
            self.cancel()

    def _start(self) -> None:
        self.task = self.loop.create_task(self.work)
        self.task.add_done_callback(self._answer)

    def _cancel(self) -> None:
        if self.task is not None:  # it was sent before this was
            self.task.cancel()

    def _answer(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # so that one whose caller has gone is not logged as never retrieved
        with suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self.caller.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class LocalAsyncActor:
    """See the module docstring."""

    def __init__(self, spec: ClassWithInitArgs, options: AsyncActorOptions) -> None:
        self.name = options.name
        self._thread = LoopThread(options.name)
        self._killed = False
        self._object = HostedObject(options.max_concurrency)
        context = WorkerContext(role=options.name, device=options.device, master_port=int(os.environ.get("MASTER_PORT", 0)))
        try:
            for module in options.plugins:
                importlib.import_module(module)
            self._thread.run(self._object.build(spec, context), timeout=options.start_deadline_s)
        except RemoteError as failure:
            self.kill()
            raise failure.error from (failure.__cause__ or failure.cause)
        except TimeoutError:
            self.kill()
            raise DeadlineError(
                f"{self.name}.__init__", options.start_deadline_s, "its thread goes on in the background"
            ) from None
        except BaseException:
            self.kill()
            raise

    @property
    def ended(self) -> bool:
        return self._killed

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        if self._killed:
            raise self._death(method)
        call = _Call(self._object.run(method, args, kw), self._thread.loop)
        if not call.send():
            raise self._death(method)
        timer = None if deadline_s is None else call.caller.call_later(deadline_s, call.expire)
        try:
            await call.ended
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if call.expired:
            raise DeadlineError(f"{self.name}.{method}", float(deadline_s or 0.0))
        if call.task is None or call.task.cancelled():
            raise self._death(method) if self._killed else self._object.cancelled_itself(method).error
        try:
            return call.task.result()
        except RemoteError as failure:
            raise failure.error from (failure.__cause__ or failure.cause)

    async def until_ended(self) -> None:
        if not self._killed:
            lasting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), self._thread.loop))
            try:
                await asyncio.wait((lasting,))
            finally:
                lasting.cancel()

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._thread.stop_soon()

    def _death(self, method: str) -> WorkerDiedError:
        return WorkerDiedError(f"it was ended while or before it ran {method}", role=self.name, rank=0, node="127.0.0.1")
