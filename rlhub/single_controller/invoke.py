"""Runs the worker's side of a call: builds workers, runs their methods (sync or async), and turns errors into typed ones.

`RankWorkers` has the workers of one rank, `ActorObject` the object of an AsyncActor.  Both backends share them, so that a worker
or an actor behaves alike under Ray and in process.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict

from rlhub.errors import RlhubError, WorkerError
from rlhub.protocol import BatchRef, DataProto, DataProtoFuture, Retain
from rlhub.protocol.exchange import ROWS, Handover, RowKeeper
from rlhub.protocol.sequences import with_padding
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext
from rlhub.utils import faults
from rlhub.utils.aio.loop_thread import LoopThread


class RemoteError(Exception):
    """Carries a worker's failure across the process boundary: the error to raise on the driver and, when the original is
    one of rlhub's (these pickle with their fields), the original as its cause."""

    def __init__(self, error: WorkerError, cause: RlhubError | None) -> None:
        super().__init__(error, cause)
        self.error = error
        self.cause = cause


def describe_failure(error: Exception, context: WorkerContext, method: str) -> RemoteError:
    """Says where and how a worker failed.  A failure that came from another worker keeps that worker's name."""
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
    """Raises RemoteError for anything that goes wrong inside: the process boundary of a worker."""
    try:
        yield
    except Exception as error:
        raise describe_failure(error, context, method) from error


class RankWorkers:
    """The workers of one rank by role, and the way to call them: one call at a time, from whichever thread it comes.

    Their `async def` methods run on one event loop in a background thread.  It keeps running between calls, so tasks that a
    worker left behind (a server, a pump) go on.
    """

    def __init__(self, handover: Handover | None = None) -> None:
        self._turn = threading.RLock()  # in process a validation that runs during training calls the same workers
        self._rows = RowKeeper(handover)
        self._workers: dict[str, Any] = {ROWS: self._rows}
        self._contexts: dict[str, WorkerContext] = {}
        self._loop: LoopThread | None = None

    def add(self, spec: ClassWithInitArgs, context: WorkerContext) -> None:
        """Constructs a role's worker here."""
        with failures_of(context, "__init__"):
            self._workers[context.role] = spec.build(context)
            self._contexts[context.role] = self._contexts[ROWS] = context
            self._rows.place(context.rank, f"cuda:{context.local_rank}" if context.device == "cuda" else "cpu")

    def run(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        materialize: bool = True,
        step: int | None = None,
        retain: Retain | None = None,
    ) -> Any:
        """Runs a method; raises RemoteError.  step: the caller's, where that is another process.  retain: what of the result
        stays here; then the rest of it comes back as a BatchRef."""
        context = self._contexts.get(role) or WorkerContext(role=role)
        with self._turn, failures_of(context, method):
            if role not in self._workers:
                raise LookupError(f"no worker of role {role!r} lives here; roles: {', '.join(self._workers) or 'none'}")
            rows = next((value for value in (*args, *kwargs.values()) if isinstance(value, BatchRef)), None)
            if materialize and role != ROWS:
                args = [self._materialized(value) for value in args]
                kwargs = {name: self._materialized(value) for name, value in kwargs.items()}
            faults.at_call(role, method, faults.current_step() if step is None else step, context.rank)
            result = getattr(self._workers[role], method)(*args, **kwargs)
            if inspect.iscoroutine(result):
                self._loop = self._loop or LoopThread("rlhub-worker-loop")
                result = self._loop.run(result)
            return result if retain is None else retain.keep(result, self._rows.store, rows)

    def _materialized(self, value: Any) -> Any:
        """Returns the batch of a future, and that of a reference from this process's own store, padded."""
        if isinstance(value, BatchRef):
            rows = value.local(self._rows.store)
            return DataProto(TensorDict(with_padding(rows.tensors()), [len(rows)]), rows.non_tensor_batch, rows.meta_info)
        return value.get() if isinstance(value, DataProtoFuture) else value

    def close(self) -> None:
        """Lets every worker release what it holds; a failure of one does not stop the others."""
        failures: list[RemoteError] = []
        for role in list(self._workers):
            try:
                self.run(role, "close", (), {})
            except RemoteError as failure:
                failures.append(failure)
        self._workers.clear()
        if self._loop is not None:
            self._loop.stop()
            self._loop = None
        if failures:
            raise failures[0]


class ActorObject:
    """The object of an AsyncActor, built and called on one event loop.  max_concurrency: methods that run at the same time."""

    def __init__(self, max_concurrency: int) -> None:
        self._places = asyncio.Semaphore(max_concurrency)
        self._context = WorkerContext()
        self._object: Any = None

    async def build(self, spec: ClassWithInitArgs, context: WorkerContext) -> None:
        """Constructs it here.  Raises RemoteError."""
        self._context = context
        with failures_of(context, "__init__"):
            self._object = spec.build(context)

    async def run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a method; one that is not `async def` must be quick, for the others wait.  Raises RemoteError."""
        async with self._places:
            try:  # not failures_of, which costs as much as all else here
                result = getattr(self._object, method)(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                raise describe_failure(error, self._context, method) from error

    def cancelled_itself(self, method: str) -> RemoteError:
        """Returns the failure of a method that ended as cancelled though no caller had cancelled it."""
        context = self._context
        error = WorkerError(
            f"{method} was cancelled from within",
            role=context.role,
            rank=context.rank,
            node=context.node,
            remote_type="CancelledError",
        )
        return RemoteError(error, None)
