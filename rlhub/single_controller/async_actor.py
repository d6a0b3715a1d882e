"""`AsyncActor`: an object with `async def` methods in a process of its own, called from any event loop, many calls at once.

    actor = start_async_actor(ClassWithInitArgs(Server, config), AsyncActorOptions(name="rollout-0"), backend="ray")
    completion = await actor.call("agenerate", request, deadline_s=60.0)

The local backend gives it a thread with its own event loop in this process instead.  `ActorTaskRunner` is the task runner over a
pool of such actors; each task is a method that runs in the least loaded of them.

    runner = ActorTaskRunner([start_async_actor(spec, options) for options in ...], max_concurrent=128)
    runner.submit("run_episode", prompt)
    results = runner.wait(1)

To hide the way to the actors and back, let `max_concurrent` be above the sum of their `max_concurrency`: the surplus waits in the
actors, and starts the moment one of their calls ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from rlhub.errors import ResourceError
from rlhub.utils.aio.task_runner import AsyncTaskRunner


class ActorConnection(Protocol):
    """Calls an actor from one event loop."""

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        """Does as AsyncActor.call."""
        ...


class ActorAddress(Protocol):
    """Calls an actor from another process than the one that started it; it can be sent there as an argument of a call."""

    def begin(self, method: str, *args: Any, deadline_s: float | None = None) -> Callable[[], Any]:
        """Starts a call; what it returns waits for the result.  That raises WorkerError, WorkerDiedError, or DeadlineError where
        it has waited for `deadline_s`; the method goes on."""
        ...

    def connect(self) -> ActorConnection:
        """Returns a connection of the running event loop."""
        ...


class AsyncActor(Protocol):
    """The caller's side of an actor."""

    name: str

    @property
    def ended(self) -> bool:
        """Returns whether it was killed or its process is known to have died: every call fails from now on."""
        ...

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        """Runs a method in the actor and returns its result.  From any event loop; calls run concurrently, in the order of
        sending.

        Cancelling the await cancels the method.  Raises WorkerError (the method raised; one of rlhub's own errors is its
        cause), WorkerDiedError (the process is gone), DeadlineError (not done after `deadline_s`; the method is cancelled).
        """
        ...

    @property
    def address(self) -> ActorAddress:
        """Returns what other processes call it by."""
        ...

    async def until_ended(self) -> None:
        """Returns when it has ended, so that it can be replaced at once and not at the next call."""
        ...

    def kill(self) -> None:
        """Ends it and what it started, without waiting; running calls raise WorkerDiedError.  May be called twice."""
        ...


class _LoadedActor:
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
        self._places = tuple(_LoadedActor(actor) for actor in actors)

    @property
    def loads(self) -> Mapping[str, int]:
        """Returns the number of tasks by the name of the actor."""
        return {place.actor.name: place.load for place in self._places}

    def add_actor(self, actor: AsyncActor) -> None:
        """Gives it tasks from now on."""
        self._places = (*self._places, _LoadedActor(actor))

    def remove_actor(self, name: str) -> None:
        """Gives it no more tasks; those that it has go on."""
        self._places = tuple(place for place in self._places if place.actor.name != name)

    def submit(
        self,
        async_fn: Callable[..., Awaitable[Any]] | str,
        *args: Any,
        task_id: str | None = None,
        deadline: float | None = None,
        **kw: Any,
    ) -> str:
        """Submits a call of the actors' method of this name; a coroutine function runs on the runner's own loop instead."""
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
        """Does as `submit`, for a caller on any event loop."""
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

    def _least_loaded(self, method: str) -> _LoadedActor:
        if any(place.actor.ended for place in self._places):
            self._places = tuple(place for place in self._places if not place.actor.ended)
        if not self._places:
            raise ResourceError(f"{self.name} has no live actor to run {method}; add one with add_actor")
        return min(self._places, key=_load)


def _load(place: _LoadedActor) -> int:
    return place.load
