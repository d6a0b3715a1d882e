"""An AsyncActor in this process: its object lives on the event loop of a thread of its own.

Arguments and results are passed as they are, not copied.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

from rlhub.errors import DeadlineError, WorkerDiedError
from rlhub.single_controller.async_actor import AsyncActorOptions
from rlhub.single_controller.hosted import HostedObject
from rlhub.single_controller.invoke import RemoteError
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext
from rlhub.utils.loop_thread import LoopThread


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
        running = self._object.run(method, args, kw)
        try:
            outcome = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, self._thread.loop))
        except RuntimeError:  # its loop was closed a moment ago
            running.close()
            raise self._death(method) from None
        try:
            done, _ = await asyncio.wait((outcome,), timeout=deadline_s)
        except asyncio.CancelledError:
            outcome.cancel()
            raise
        if not done:
            outcome.cancel()
            raise DeadlineError(f"{self.name}.{method}", float(deadline_s or 0.0))
        if outcome.cancelled():
            raise self._death(method) if self._killed else self._object.cancelled_itself(method).error
        try:
            return outcome.result()
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
