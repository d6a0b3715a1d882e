"""ActorPool: the actors that run one kind of user code (episodes, environments), with their start, restarts and end.

A pool lives on the event loop of the episodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhub.errors import DeadlineError, RlhubError, WorkerDiedError, WorkerError, WorkflowError

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import AsyncActor

logger = logging.getLogger(__name__)

StartActor = Callable[[str], Awaitable["AsyncActor"]]
"""Starts the actor with this name."""

UNLIMITED = 1 << 20
"""Maximum number of concurrent calls in an actor.  Some calls wait there for long, and the calls that end their wait must never
queue behind them."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class PooledActor:
    """An actor of a pool.  home: the name of this one process; an actor that replaces it has another.  episodes: the number of
    episodes that it serves.  places: how many of them occupy a place of each limited kind."""

    name: str
    actor: AsyncActor
    home: str = ""
    episodes: int = 0
    places: Counter[str] = field(default_factory=Counter)


class ActorPool:
    """Keeps `num_actors` actors running: one that dies is replaced at once, up to `restarts` times each.

    kind: the noun in messages.  metric: the prefix of the metrics' names.  prefix: the prefix of the names of actors and logs.
    counts: deaths, restarts, and the counts of subclasses.
    """

    kind = "actor"
    metric = "rollout/actor"
    prefix = "actors"

    def __init__(self, start_actor: StartActor, num_actors: int, *, restarts: int = 3, shutdown_s: float = 60.0) -> None:
        self._start_actor, self._num_actors, self._restarts = start_actor, num_actors, restarts
        self._shutdown_s = shutdown_s
        self.members: list[PooledActor] = []
        self.counts: Counter[str] = Counter()
        self._restarted: Counter[str] = Counter()
        self._num_replacing = 0  # actors that are being started in place of others
        self._starting: set[asyncio.Future[AsyncActor]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: RlhubError | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts all actors.  If one cannot start, the others are ended and its error is raised."""
        joining = (self._join(f"{self.prefix}-{number}") for number in range(self._num_actors))
        failures = [found for found in await asyncio.gather(*joining, return_exceptions=True) if found is not None]
        if failures:
            await self.close()
            raise failures[0]

    async def choose(self) -> PooledActor:
        """Returns the actor with the fewest episodes.  Waits while all are being replaced; raises WorkflowError when none will
        be."""
        while True:
            if self._failure is not None:
                raise self._failure
            self._drop_ended()
            if self.members:
                return min(self.members, key=lambda member: member.episodes)
            if self._failure is None:
                await self._changed.wait()

    def lost(self, member: PooledActor, why: BaseException | str) -> None:
        """Ends an actor that died or hangs, and starts another in its place.  Repeated calls for the same actor do nothing."""
        if member not in self.members or self._closed:
            return
        self.members.remove(member)
        member.actor.kill()
        self.counts["deaths"] += 1
        reason = str(why).partition("\n")[0]
        logger.warning("%s %s with %d episodes is lost: %s", self.kind, member.name, member.episodes, reason)
        self._replace(member.name, why)

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Returns a task that runs a coroutine, and is cancelled when the pool closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends all actors with everything they run.  Idempotent."""
        self._closed = True
        if self._failure is None:
            self._failure = WorkflowError(f"the {self.kind}s were closed")
        self._notify()
        tasks, members, self.members = list(self._tasks), self.members, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(member) for member in members), self._end_unwanted())

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of deaths and restarts since the start."""
        return {f"{self.metric}_{name}": float(self.counts[name]) for name in ("deaths", "restarts")}

    def _drop_ended(self) -> None:
        """Replaces actors whose process has ended and was not reported yet."""
        for member in [member for member in self.members if member.actor.ended]:
            self.lost(member, "its process has ended")

    def _replace(self, name: str, why: BaseException | str) -> None:
        if self._restarted[name] < self._restarts:
            self._restarted[name] += 1
            self.counts["restarts"] += 1
            self._num_replacing += 1
            self.background(self._restart(name))
        elif not self.members and not self._num_replacing:
            self._failure = WorkflowError(
                f"all {self._num_actors} {self.kind}s have died, each as often as actor_rollout_ref.rollout.replica_restarts="
                f"{self._restarts} allows; the last: {why}. Their logs are in the run folder (logs/{self.prefix}-*.log)"
            )
        self._notify()

    async def _restart(self, name: str) -> None:
        failed: RlhubError | None = None
        try:
            await self._join(name)
        except RlhubError as error:
            failed = error
        finally:
            self._num_replacing -= 1
        if failed is not None:
            logger.warning("%s %s could not be started again: %s", self.kind, name, failed)
            self._replace(name, failed)

    async def _join(self, name: str) -> None:
        starting = asyncio.ensure_future(self._start_actor(name))
        self._starting.add(starting)
        try:
            actor = await asyncio.shield(starting)
        except RlhubError:
            self._starting.discard(starting)
            raise
        if self._closed:
            return
        self._starting.discard(starting)
        member = PooledActor(name, actor, f"{name}.{self._restarted[name]}")
        self.members.append(member)
        self.background(self._watch(member))
        self._notify()

    async def _watch(self, member: PooledActor) -> None:
        await member.actor.until_ended()
        self.lost(member, "its process has ended")

    async def _end(self, member: PooledActor) -> None:
        try:
            await member.actor.call("close", deadline_s=self._shutdown_s)
        except (WorkerError, DeadlineError) as error:
            logger.warning("%s %s did not end in order: %s", self.kind, member.name, error)
        member.actor.kill()

    async def _end_unwanted(self) -> None:
        """Ends the actors whose start was still in progress when the pool closed."""
        if self._starting:
            done, _ = await asyncio.wait(self._starting, timeout=self._shutdown_s)
            for started in done:
                if started.exception() is None:
                    started.result().kill()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def own_error(error: WorkerError) -> Exception:
    """Returns the error that the code in an actor raised, as the driver would have raised it, where its type is known; otherwise
    the WorkerError itself."""
    if isinstance(error.__cause__, RlhubError) and not isinstance(error, WorkerDiedError):
        own, error.__cause__ = error.__cause__, None
        return own
    if error.remote_type == TimeoutError.__name__:
        return TimeoutError(str(error))
    return error
