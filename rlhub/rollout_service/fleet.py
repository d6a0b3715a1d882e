"""Fleet: the replicas of the rollout service and their life: start, weight updates, death, restart, removal.

It lives on the event loop of the router.  A replica serves only with the newest weights, and loads them before its first request.
New weights go to all replicas concurrently and each pauses on its own, so that a dead or hanging replica does not delay the
others: one that does not answer within its deadline is ended and started again, up to `restarts` times each.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhub.errors import DeadlineError, EngineError, RlhubError, WeightMismatchError, WorkerDiedError, WorkerError
from rlhub.rollout_service.replica import PublishedWeights, Replica
from rlhub.rollout_service.server import ReplicaStatus, UpdateReport

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import AsyncActor

logger = logging.getLogger(__name__)

StartReplica = Callable[[str], Awaitable["AsyncActor"]]
"""Starts the process of the replica with this name; it has built its RolloutServer, but not the engine."""

PATIENCE_FACTOR = 5.0
ROLE = "rollout"
CLOSED = "the rollout service was closed"


@dataclass(slots=True, kw_only=True, frozen=True)
class FleetLimits:
    """Time limits in seconds, and `restarts`, the maximum number of restarts of each replica after it died or hung.

    patience_s: after the first replica has loaded new weights, the update waits for the others for this time, or for five times
    as long as the first one took if that is more; a later one gets no requests until it has loaded them.  ping_s: the interval
    between status checks; a replica that does not answer within ping_deadline_s hangs.  drain_s: time for the requests of a
    replica that leaves.
    """

    restarts: int = 3
    start_s: float = 1800.0
    update_s: float = 1800.0
    shutdown_s: float = 60.0
    drain_s: float = 7200.0
    patience_s: float = 10.0
    ping_s: float = 3.0
    ping_deadline_s: float = 60.0


class Fleet:
    """Manages the replicas.  All methods are called on the loop."""

    def __init__(self, start_replica: StartReplica, limits: FleetLimits, *, own_weights: bool = False) -> None:
        """Creates an empty fleet.  own_weights: replicas have loaded the model's files, and also serve before the first
        publication."""
        self.limits = limits
        self._own_weights = own_weights
        self.replicas: dict[str, Replica] = {}
        self.newest: PublishedWeights | None = None
        self.failure: RlhubError | None = None  # why nothing will ever serve again
        self.counts: Counter[str] = Counter()
        self.updates: list[tuple[str, UpdateReport]] = []  # of the newest publication
        self._start_replica = start_replica
        self._settled = -1  # replicas behind this publication get no requests
        self._paused = self._closed = self._sleeps = False
        self._late_error: BaseException | None = None
        self._given_up: RlhubError | None = None  # the failure, should no replica be left
        self._restarted: Counter[str] = Counter()
        self._starting_names: set[str] = set()
        self._fingerprints: dict[int, str] = {}
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starts: set[asyncio.Future[AsyncActor]] = set()  # starts in progress
        self._joining: set[AsyncActor] = set()  # started, not in the fleet yet

    # -- who serves --------------------------------------------------------------------------------------------------------

    def serving(self) -> list[Replica]:
        """Returns the replicas that new requests may go to."""
        return [replica for replica in self.replicas.values() if self.serves(replica)]

    def serves(self, replica: Replica) -> bool:
        """Returns whether new requests may go to the replica."""
        return replica.state == "serving" and replica.publication >= self._settled

    async def changed(self) -> None:
        """Waits until a replica has joined, left or loaded weights.  Raises `failure` once no replica can join any more."""
        if self.failure is None:
            await self._changed.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises `failure` if no replica will ever serve again."""
        if self.failure is not None:
            raise self.failure

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- joining and leaving -----------------------------------------------------------------------------------------------

    async def add(self, name: str) -> None:
        """Starts a replica; it serves when it has the newest weights.  Raises the errors of its start."""
        self.raise_failure()
        if name in self.names:
            raise EngineError(f"there is a replica {name!r} already; replicas: {', '.join(self.replicas)}")
        self._starting_names.add(name)
        try:
            await self._join(name)
        finally:
            self._starting_names.discard(name)

    @property
    def starting(self) -> frozenset[str]:
        """Returns the names of the replicas that start, or start again, and do not run."""
        return frozenset(self._starting_names - self.replicas.keys())

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of all replicas, which no other may get."""
        return self.starting | self.replicas.keys()

    @property
    def is_paused(self) -> bool:
        """Returns whether all replicas are paused, by `pause`."""
        return self._paused

    async def remove(self, name: str) -> None:
        """Lets a replica finish its requests, and those of views that pin it, then ends it.  Requests that are not done within
        drain_s move to other replicas."""
        replica = self._find(name)
        replica.state = "leaving"
        self._notify()
        try:
            if not await asyncio.wait_for(self._drained(replica), self.limits.drain_s):
                return
        except TimeoutError:
            logger.warning("replica %s still has %d requests; they go to other replicas", name, replica.requests)
        await self._end(replica)

    async def _drained(self, replica: Replica) -> bool:
        """Waits until no request or pin needs the replica.  Returns False where it has died meanwhile."""
        while replica.state != "dead" and (replica.requests or replica.pins):
            await (replica.idle.wait() if replica.requests else self._changed.wait())
        return replica.state != "dead"

    async def restart(self, name: str) -> None:
        """Replaces a replica by a new one, without counting as one of its restarts.  If the start fails, it is repeated as after
        a death."""
        self._find(name)
        if name in self._starting_names:
            raise EngineError(f"replica {name!r} is being replaced already")
        self._starting_names.add(name)  # until it joins: its name stays taken, and the fleet does not count as empty
        try:
            await self.remove(name)
            await self._join(name)
        except Exception as error:
            if not self._closed:
                self._background(self._revive(name, error))
            raise
        except asyncio.CancelledError:
            self._starting_names.discard(name)
            raise
        self._starting_names.discard(name)

    def _find(self, name: str) -> Replica:
        if name not in self.replicas:
            raise EngineError(f"there is no replica {name!r}; replicas: {', '.join(self.replicas) or 'none'}")
        return self.replicas[name]

    async def _join(self, name: str) -> None:
        """Starts a replica up to the state in which it serves or waits for the first weights."""
        while self._sleeps and not self._closed:  # the device's memory is the actor's until the next publication
            await self.changed()
        actor = await self._start_process(name)
        replica = Replica(name=name, actor=actor)
        self._joining.add(actor)
        try:
            self._refuse_closed()
            await actor.call("start", deadline_s=self.limits.start_s)
            paused = False
            await self._take_newest(replica)
            while paused != self._paused:
                paused = self._paused
                await actor.call("pause" if paused else "resume", deadline_s=self.limits.update_s)
                await self._take_newest(replica)  # a publication during that call
            self._refuse_closed()
        except BaseException:
            replica.state = "dead"
            actor.kill()
            raise
        finally:
            self._joining.discard(actor)
        self.replicas[name], self._given_up = replica, None
        self._background(self._guard(replica))
        self._background(self._watch(replica))
        self._notify()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError(CLOSED)

    async def _start_process(self, name: str) -> AsyncActor:
        """Starts a replica's process.  A start cannot be interrupted: if the wait for it is cancelled, `close` ends the
        process."""
        starting = asyncio.ensure_future(self._start_replica(name))
        self._starts.add(starting)
        try:
            actor = await asyncio.shield(starting)
        except Exception:
            self._starts.discard(starting)
            raise
        self._starts.discard(starting)
        return actor

    async def _end_joining(self) -> None:
        """Ends the replicas that are still starting."""
        for actor in self._joining:
            actor.kill()
        if self._starts:
            done, late = await asyncio.wait(self._starts, timeout=self.limits.shutdown_s)
            for starting in done:
                if starting.exception() is None:
                    starting.result().kill()
            for starting in late:
                logger.warning("the start of a replica did not end within %g s", self.limits.shutdown_s)
                starting.cancel()

    async def _end(self, replica: Replica) -> None:
        """Removes a replica and ends it, first by its own shutdown."""
        replica.state = "dead"
        if self.replicas.get(replica.name) is replica:  # else it died meanwhile, and a new one may have its name
            del self.replicas[replica.name]
        self._left()
        try:
            await replica.actor.call("shutdown", deadline_s=self.limits.shutdown_s)
        except (WorkerError, DeadlineError) as error:
            logger.warning("replica %s did not end in an orderly way: %s", replica.name, _first_line(error))
        replica.actor.kill()

    # -- dying -------------------------------------------------------------------------------------------------------------

    def lost(self, replica: Replica, error: Exception) -> None:
        """Ends a replica that died, hangs or cannot generate, and starts it again.  Repeated calls do nothing."""
        if replica.state == "dead" or self._closed:
            return
        logger.warning("rollout replica %s is lost: %s", replica.name, _first_line(error))
        replacing = replica.state != "leaving"
        replica.state = "dead"
        del self.replicas[replica.name]
        replica.actor.kill()
        self.counts["deaths"] += 1
        if replacing:
            self._starting_names.add(replica.name)
            self._background(self._revive(replica.name, error))
        self._left()

    async def _revive(self, name: str, error: Exception) -> None:
        while self._restarted[name] < self.limits.restarts:
            self._restarted[name] += 1
            self.counts["restarts"] += 1
            try:
                await self._join(name)
            except Exception as failure:  # noqa: BLE001  a task's boundary: requests wait for what becomes of it
                error = failure
                logger.warning("rollout replica %s could not be started again: %s", name, _first_line(failure))
            else:
                self._starting_names.discard(name)
                return
        self._starting_names.discard(name)
        self._given_up = WorkerDiedError(
            f"no replica of the rollout service is left: {name} was lost after {self._restarted[name]} restarts "
            f"(actor_rollout_ref.rollout.replica_restarts); last: {_first_line(error)}",
            role=ROLE,
            rank=0,
        )
        self._given_up.__cause__ = error
        self._left()

    def _left(self) -> None:
        """Sets `failure` if no replica runs or starts, because all were given up."""
        if not (self.replicas or self._starting_names or self._closed or self.failure):
            self.failure = self._given_up
        self._notify()

    async def _guard(self, replica: Replica) -> None:
        """Detects the death of a replica at once, even if no request waits for it."""
        await replica.actor.until_ended()
        self.lost(replica, WorkerDiedError("its process ended", role=replica.name, rank=0))

    async def _watch(self, replica: Replica) -> None:
        """Detects that a replica hangs or its engine has failed, even if no request waits for it."""
        while replica.state != "dead":
            await self.check_status(replica)
            await asyncio.sleep(self.limits.ping_s)

    async def check_status(self, replica: Replica) -> ReplicaStatus | None:
        """Returns the status of a replica; if it does not answer or can no longer generate, ends it and returns None."""
        try:
            status: ReplicaStatus = await replica.actor.call("status", deadline_s=self.limits.ping_deadline_s)
        except (WorkerError, DeadlineError) as error:
            self.lost(replica, error)
            return None
        if status.failure:
            self.lost(replica, EngineError(status.failure))
            return None
        return status

    # -- weights -----------------------------------------------------------------------------------------------------------

    async def update(self, folder: str, version: int) -> list[tuple[str, UpdateReport]]:
        """Loads the weights `version` of the folder into every replica; returns (replica, report) of those that have them by
        then.

        If the only replica is pinned, waits for its release.  Raises `failure`, and the error of a replica that cannot load the
        weights (damaged files, another model).
        """
        async with self._publishing:
            while len(self.replicas) == 1 and all(replica.pins for replica in self.replicas.values()):
                await self.changed()
            self.raise_failure()
            if self._late_error is not None:
                raise self._late_error
            self._sleeps = False
            number = self.newest.number + 1 if self.newest else 0
            self.newest = PublishedWeights(number=number, folder=folder, version=version)
            self.updates = []
            tasks = [asyncio.create_task(self._catch_up(replica)) for replica in self.replicas.values() if not replica.pins]
            await self._wait_for_most(tasks)
            self._settled = number
            self._notify()
            return list(self.updates)

    async def _wait_for_most(self, tasks: list[asyncio.Task[None]]) -> None:
        """Waits for all tasks, or for a limited time after the first has finished; raises an error of any."""
        clock, limit, waiting = asyncio.get_running_loop().time, None, set(tasks)
        started = clock()
        while waiting:
            elapsed = clock() - started
            if limit is None and self.updates:
                limit = elapsed + max(self.limits.patience_s, PATIENCE_FACTOR * elapsed)
            if limit is not None and elapsed >= limit:
                break
            left = None if limit is None else limit - elapsed
            _, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            self._background_task(task)
        for task in set(tasks) - waiting:
            task.result()

    async def _catch_up(self, replica: Replica) -> None:
        """Loads the newest weights into a replica that has joined already."""
        try:
            await self._take_newest(replica)
        except (WorkerDiedError, DeadlineError) as error:
            self.lost(replica, error)
        except RlhubError as error:
            if replica.state == "dead":  # it was removed, and its engine ended in the middle of the update
                return
            engine_failed = isinstance(error, WorkerError) and await self.check_status(replica) is None
            self.lost(replica, error)  # it must not serve weights that are not whole
            if not engine_failed:
                raise

    async def _take_newest(self, replica: Replica) -> None:
        """Loads weights until there are no newer ones; then the replica may serve."""
        async with replica.turn:
            while self.newest is not None and replica.publication < self.newest.number and not replica.pins:
                await self._take(replica, self.newest)
            if replica.state in ("fresh", "asleep") and (replica.publication >= 0 or self._own_weights):
                replica.state = "serving"
        self._notify()

    async def _take(self, replica: Replica, goal: PublishedWeights) -> None:
        try:
            report: UpdateReport = await replica.actor.call(
                "update_weights", goal.folder, goal.version, deadline_s=self.limits.update_s
            )
        except (WorkerDiedError, DeadlineError):
            raise
        except WorkerError:
            if goal is self.newest:
                raise
            return  # those weights may be gone; newer ones are there
        expected = self._fingerprints.setdefault(goal.number, report.fingerprint)
        if report.fingerprint != expected or report.version != goal.version:
            raise WeightMismatchError(
                f"replica {replica.name} was to take version {goal.version} of the weights (fingerprint {expected}) and holds "
                f"version {report.version} ({report.fingerprint}): its samples would not come from that policy",
                weight="",
            )
        replica.version, replica.publication = goal.version, goal.number
        if goal is self.newest:
            self.updates.append((replica.name, report))
        self._fingerprints = {number: value for number, value in self._fingerprints.items() if number >= goal.number - 1}

    def unpin(self, replica: Replica) -> None:
        """Removes one pin; without pins the replica loads the newest weights."""
        replica.pins -= 1
        if not replica.pins and replica.state != "dead":
            self._background(self._catch_up(replica))
        self._notify()

    # -- all of them -------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stops sampling in all replicas until `resume`, also in those that join meanwhile."""
        self._paused = True
        await self._on_all("pause")

    async def resume(self) -> None:
        """Continues sampling in all replicas."""
        self._paused = False
        await self._on_all("resume")

    async def sleep(self, *, keep_weights: bool) -> None:
        """Has all replicas give their memory to the actor on their devices until the next publication, once their requests and
        the views that pin them are done.  One that joins meanwhile starts after it.

        keep_weights: in host memory, because that publication brings only what has changed.
        """
        self._sleeps = True
        await asyncio.gather(*(self._put_to_sleep(replica, keep_weights) for replica in self.serving()))

    async def _put_to_sleep(self, replica: Replica, keep_weights: bool) -> None:
        while replica.pins and replica.state == "serving":
            await self._changed.wait()
        async with replica.turn:
            if replica.state != "serving":
                return
            replica.state, replica.publication = "asleep", -1
            if not await self._drained(replica):
                return
            try:
                await replica.actor.call("sleep", keep_weights, deadline_s=self.limits.update_s)
            except (WorkerError, DeadlineError) as error:
                self.lost(replica, error)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Aborts these requests in all replicas."""
        await self._on_all("abort", list(request_ids))

    async def _on_all(self, method: str, *args: Any) -> None:
        async def one(replica: Replica) -> None:
            try:
                await replica.actor.call(method, *args, deadline_s=self.limits.update_s)
            except (WorkerError, DeadlineError) as error:
                self.lost(replica, error)

        await asyncio.gather(*(one(replica) for replica in list(self.replicas.values())))

    async def close(self) -> None:
        """Ends all replicas.  Idempotent."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failure is None:
            self.failure = EngineError(CLOSED)
        self._notify()  # to those who wait for a replica
        await asyncio.gather(*(self._end(replica) for replica in list(self.replicas.values())), self._end_joining())

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        self._background_task(asyncio.get_running_loop().create_task(work))

    def _background_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._late_error = task.exception()  # no call waits for it: the next update raises it
            logger.error("rollout service: %s", self._late_error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
