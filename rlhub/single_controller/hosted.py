"""`HostedObject`: the object of an AsyncActor on its own event loop.  Shared by both backends, so that it behaves alike."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rlhub.errors import WorkerError
from rlhub.single_controller.invoke import RemoteError, describe_failure, failures_of
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext


class HostedObject:
    """Built and called on one event loop.  max_concurrency: methods that run at the same time."""

    def __init__(self, max_concurrency: int) -> None:
        self._places = asyncio.Semaphore(max_concurrency)
        self._context = WorkerContext()
        self._object: Any = None

    async def build(self, spec: ClassWithInitArgs, context: WorkerContext) -> None:
        """Construct it here.  Raises RemoteError."""
        self._context = context
        with failures_of(context, "__init__"):
            self._object = spec.build(context)

    async def run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a method; one that is not `async def` must be quick, for the others wait.  Raises RemoteError."""
        async with self._places:
            try:  # not failures_of, which costs as much as all else here
                result = getattr(self._object, method)(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                raise describe_failure(error, self._context, method) from error

    def cancelled_itself(self, method: str) -> RemoteError:
        """For a method that ended as cancelled though nobody had asked for that."""
        context = self._context
        error = WorkerError(
            f"{method} was cancelled from within",
            role=context.role,
            rank=context.rank,
            node=context.node,
            remote_type="CancelledError",
        )
        return RemoteError(error, None)
