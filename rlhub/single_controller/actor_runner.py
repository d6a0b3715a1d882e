"""`ActorTaskRunner`: the task runner over a pool of AsyncActors; each task is a method that runs in the least loaded of them.

    runner = ActorTaskRunner([start_async_actor(spec, options) for options in ...], max_concurrent=128)
    runner.submit("run_episode", prompt)
    outcomes = runner.wait(1)

To hide the way to the actors and back, let `max_concurrent` be above the sum of their `max_concurrency`: the surplus waits in the
actors, and starts there the moment a place is free.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlhub.errors import ResourceError
from rlhub.single_controller.async_actor import AsyncActor
from rlhub.utils.aio.task_runner import AsyncTaskRunner


class _Place:
    """An actor of the pool and the number of its tasks."""

    __slots__ = ("actor", "load")

    def __init__(self, actor: AsyncActor) -> None:
        self.actor = actor
        self.load = 0


class ActorTaskRunner(AsyncTaskRunner):
    """See the module docstring and AsyncTaskRunner, whose limits count the tasks of all actors together.

    The actors belong to the caller: `close` cancels the tasks and leaves the actors.  A task whose actor dies ends as Failed with
    WorkerDiedError, and the actor gets no more; with no actor left tasks end as Failed with ResourceError.
    """

    def __init__(self, actors: Sequence[AsyncActor], **limits: Any) -> None:
        super().__init__(**limits)
        self._places = tuple(_Place(actor) for actor in actors)

    @property
    def loads(self) -> Mapping[str, int]:
        """Number of tasks by the name of the actor."""
        return {place.actor.name: place.load for place in self._places}

    def add_actor(self, actor: AsyncActor) -> None:
        """Give it tasks from now on."""
        self._places = (*self._places, _Place(actor))

    def remove_actor(self, name: str) -> None:
        """Give it no more tasks; those that it has go on."""
        self._places = tuple(place for place in self._places if place.actor.name != name)

    def submit(
        self,
        async_fn: Callable[..., Awaitable[Any]] | str,
        *args: Any,
        task_id: str | None = None,
        deadline: float | None = None,
        **kw: Any,
    ) -> str:
        """As AsyncTaskRunner.submit, with the name of the actors' method; a coroutine function runs here, as it does there."""
        if isinstance(async_fn, str):
            return super().submit(self._invoke, async_fn, args, kw, task_id=task_id, deadline=deadline)
        return super().submit(async_fn, *args, task_id=task_id, deadline=deadline, **kw)

    async def asubmit(
        self,
        async_fn: Callable[..., Awaitable[Any]] | str,
        *args: Any,
        task_id: str | None = None,
        deadline: float | None = None,
        **kw: Any,
    ) -> str:
        """`submit` for a caller on any event loop."""
        if isinstance(async_fn, str):
            return await super().asubmit(self._invoke, async_fn, args, kw, task_id=task_id, deadline=deadline)
        return await super().asubmit(async_fn, *args, task_id=task_id, deadline=deadline, **kw)

    async def _invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self._least_loaded(method)
        place.load += 1
        try:
            return await place.actor.call(method, *args, **kwargs)
        finally:
            place.load -= 1

    def _least_loaded(self, method: str) -> _Place:
        if any(place.actor.ended for place in self._places):
            self._places = tuple(place for place in self._places if not place.actor.ended)
        if not self._places:
            raise ResourceError(f"{self.name} has no live actor to run {method}; add one with add_actor")
        return min(self._places, key=_load)


def _load(place: _Place) -> int:
    return place.load
