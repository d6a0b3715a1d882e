"""The worker's side of a call: build workers, run their methods (sync or async), and turn errors into typed ones.

Shared by both backends, so that a worker behaves alike under Ray and in process.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import traceback
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhub.errors import RlhubError, WorkerError
from rlhub.protocol import DataProtoFuture
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext
from rlhub.utils import faults


class RemoteError(Exception):
    """Carries a worker's failure across the process boundary: the error to raise on the driver and, when the original is
    one of rlhub's (these pickle with their fields), the original as its cause."""

    def __init__(self, error: WorkerError, cause: RlhubError | None) -> None:
        super().__init__(error, cause)
        self.error = error
        self.cause = cause


def describe_failure(error: Exception, context: WorkerContext, method: str) -> RemoteError:
    """Where and how a worker failed.  A failure that came from another worker keeps that worker's name."""
    cause = error if isinstance(error, RlhubError) and _pickles(error) else None
    if isinstance(error, WorkerError):
        return RemoteError(error, None)
    wrapped = WorkerError(
        f"{method} raised {type(error).__name__}: {error}",
        role=context.role,
        rank=context.rank,
        node=context.node,
        remote_type=type(error).__name__,
        remote_traceback="".join(traceback.format_exception(error)),
    )
    return RemoteError(wrapped, cause)


def _pickles(error: RlhubError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a field may raise anything while pickling; the description then goes without it
        return False
    return True


@contextmanager
def failures_of(context: WorkerContext, method: str) -> Iterator[None]:
    """Raise RemoteError for anything that goes wrong inside: the process boundary of a worker."""
    try:
        yield
    except Exception as error:
        raise describe_failure(error, context, method) from error


class EventLoopThread:
    """One event loop in a background thread, for the `async def` methods of a process; it keeps running between calls, so
    tasks that a worker left behind (a server, a pump) go on."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run to completion and return the result; the calling thread waits."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rlhub-worker-loop", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5.0)
            self._loop = None


class RoleHost:
    """The workers of one rank by role, and the way to call them: one call at a time, from whichever thread it comes."""

    def __init__(self) -> None:
        self._turn = threading.RLock()  # in process the validation beside training calls the same workers as training
        self._workers: dict[str, Any] = {}
        self._contexts: dict[str, WorkerContext] = {}
        self._loop = EventLoopThread()

    def add(self, spec: ClassWithInitArgs, context: WorkerContext) -> None:
        """Construct a role's worker here."""
        with failures_of(context, "__init__"):
            self._workers[context.role] = spec.build(context)
            self._contexts[context.role] = context

    def call(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        materialize: bool = True,
        step: int | None = None,
    ) -> Any:
        """Run a method; raises RemoteError.  step: the caller's, where that is another process."""
        context = self._contexts.get(role) or WorkerContext(role=role)
        with self._turn, failures_of(context, method):
            if role not in self._workers:
                raise LookupError(f"no worker of role {role!r} lives here; roles: {', '.join(self._workers) or 'none'}")
            if materialize:
                args = [_materialized(value) for value in args]
                kwargs = {name: _materialized(value) for name, value in kwargs.items()}
            faults.at_call(role, method, faults.current_step() if step is None else step, context.rank)
            result = getattr(self._workers[role], method)(*args, **kwargs)
            return self._loop.run(result) if inspect.iscoroutine(result) else result

    def close(self) -> None:
        """Let every worker release what it holds; a failure of one does not stop the others."""
        failures: list[RemoteError] = []
        for role in list(self._workers):
            try:
                self.call(role, "close", (), {})
            except RemoteError as failure:
                failures.append(failure)
        self._workers.clear()
        self._loop.stop()
        if failures:
            raise failures[0]


def _materialized(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value
