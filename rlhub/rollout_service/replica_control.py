"""ReplicaControl: adds and removes replicas while a run goes on, by calls (driver, HTTP) and by the rule of elastic.py.

    change = control.begin_add("more prompts come")      # on the router's loop; the start goes on in the background
    control.begin_remove("rollout-1", "its machine is needed")
    control.describe()                                   # the replicas, the bounds and the newest changes, JSON-able

A new replica gets requests once it has the newest weights.  A replica that leaves gets no new ones, and ends when it has
completed its own.  One that dies while it starts is a failed change: its name and its devices are free again, and the rule tries
again later.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.errors import RequestError, ResourceError, RlhubError
from rlhub.registry import suggest
from rlhub.rollout_service.elastic import Action, Decision, QueueRule, ReplicaBounds
from rlhub.rollout_service.replica import Replica
from rlhub.rollout_service.router import CLOSE_S, Router
from rlhub.rollout_service.server import UpdateReport
from rlhub.tracking.spans import RecordSpan, ignore_span

logger = logging.getLogger(__name__)

CHECK_S = 1.0  # between two looks at the queue
NUM_CHANGES = 100  # that are remembered
LANE = "replicas"
"""Lane of the changes in the report's timeline and the trace."""


@dataclass(slots=True, kw_only=True)
class ReplicaChange:
    """An addition or a removal.  at: its begin, as time.time(); seconds: its duration.  failure: the error of one that failed."""

    action: Action
    replica: str
    reason: str
    at: float = field(default_factory=time.time)
    state: Literal["running", "done", "failed"] = "running"
    seconds: float = 0.0
    failure: Exception | None = None
    task: asyncio.Task[None] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the change for a reader."""
        names = ("action", "replica", "reason", "at", "state", "seconds")
        shown = {name: getattr(self, name) for name in names}
        return shown if self.failure is None else shown | {"error": str(self.failure).partition("\n")[0]}


class ReplicaControl:
    """Changes the number of replicas within `bounds`.  All methods are called on the router's loop.

    places: the number of requests that a replica runs at once.  record: called with the span of each change.  freed: called with
    the number of a replica that has ended, or could not be added, whose devices are free.
    """

    def __init__(
        self,
        router: Router,
        bounds: ReplicaBounds,
        *,
        places: int,
        record: RecordSpan = ignore_span,
        freed: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.router, self.bounds, self.places = router, bounds, places
        self.rule = QueueRule(bounds=bounds, places=places)
        self.changes: deque[ReplicaChange] = deque(maxlen=NUM_CHANGES)
        self.counts: Counter[str] = Counter()
        self._record, self._freed = record, freed
        self._running: dict[str, ReplicaChange] = {}
        self._most_waiting = 0
        self._following: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self, count: int) -> None:
        """Starts the first replicas, and then to follow the queue where the bounds say so.  After an error no start goes on."""
        started = time.perf_counter()
        starts = [asyncio.create_task(self.router.add(name_of(number))) for number in range(count)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        self.rule.changed(time.perf_counter() - started)
        if self.bounds.by_queue:
            self._following = asyncio.create_task(self._follow_queue())

    # -- changes -----------------------------------------------------------------------------------------------------------

    async def add(self, reason: str) -> str:
        """Adds a replica, and returns its name when it serves.  Raises as `begin_add`, and the error of its start."""
        return await self._ended(self.begin_add(reason))

    async def remove(self, name: str, reason: str) -> None:
        """Removes a replica, and returns when it has ended.  Raises as `begin_remove`."""
        await self._ended(self.begin_remove(name, reason))

    def begin_add(self, reason: str) -> ReplicaChange:
        """Begins to add a replica.  Raises ResourceError where there are as many as may be."""
        self.router.fleet.raise_failure()
        names, most = self._names(), self.bounds.most
        if most is not None and len(names) >= most:
            ending = [name for name, change in self._running.items() if change.action == "remove"]
            until = f"{', '.join(ending)} still ends, and frees a place" if ending else "remove one first, or raise max_replicas"
            raise ResourceError(f"there are {len(names)} replicas, of at most {most} (rollout.max_replicas): {until}")
        name = next(name for name in map(name_of, itertools.count()) if name not in names)
        return self._begin(ReplicaChange(action="add", replica=name, reason=reason), self.router.add(name))

    def begin_remove(self, name: str, reason: str) -> ReplicaChange:
        """Begins to remove a replica.  Raises RequestError for an unknown name, and ResourceError where the replica cannot be
        spared."""
        fleet = self.router.fleet
        if name not in (known := sorted(self._names())):
            raise RequestError(f"no replica {name!r}{suggest(name, known)} there are: {', '.join(known)}", param="name")
        if name not in fleet.replicas or name in self._running:
            leaving = name in self._running and self._running[name].action == "remove"
            raise ResourceError(f"replica {name} {'is being removed already' if leaving else 'starts: wait until it serves'}")
        left = sum(replica.state != "leaving" for replica in fleet.replicas.values()) - 1
        if left < 1:
            raise ResourceError(f"{name} is the last replica, and nothing would generate without it: add another first")
        if left < self.bounds.least:
            told = f"{left} replicas would be left, of at least {self.bounds.least}"
            raise ResourceError(f"{told} (rollout.min_replicas): lower it for another start, or add a replica first")
        return self._begin(ReplicaChange(action="remove", replica=name, reason=reason), self.router.remove(name))

    def _names(self) -> frozenset[str]:
        return self.router.fleet.names | self._running.keys()

    def _begin(self, change: ReplicaChange, work: Coroutine[Any, Any, None]) -> ReplicaChange:
        logger.info("%s replica %s: %s", "adding" if change.action == "add" else "removing", change.replica, change.reason)
        self.changes.append(change)
        self._running[change.replica] = change
        self.rule.changed()
        change.task = asyncio.get_running_loop().create_task(self._carry_out(change, work))
        return change

    async def _carry_out(self, change: ReplicaChange, work: Coroutine[Any, Any, None]) -> None:
        started = time.perf_counter()
        try:
            await work
        except Exception as error:  # noqa: BLE001  a task's boundary: who waits for the change gets the error
            change.state, change.failure = "failed", error
        else:
            change.state = "done"
        finally:
            del self._running[change.replica]
        ended = time.perf_counter()
        change.seconds = ended - started
        if not self._closed:
            self._conclude(change)
            self._record(LANE, f"{change.action} {change.replica}", started, ended, reason=change.reason, state=change.state)

    def _conclude(self, change: ReplicaChange) -> None:
        """Counts and reports a change that has ended."""
        self.counts[change.state if change.failure is not None else change.action] += 1
        adds, replicas = change.action == "add", len(self.router.fleet.replicas)
        if change.failure is not None:
            told = "could not be added" if adds else "was not removed in an orderly way"
            logger.warning("replica %s %s: %s", change.replica, told, change.to_json()["error"])
        else:
            told = "serves" if adds else "has ended"
            logger.info("replica %s %s after %.1f s; replicas: %d", change.replica, told, change.seconds, replicas)
        if adds and change.failure is not None:
            self.rule.failed(time.monotonic())
        else:
            self.rule.changed(change.seconds if adds else None)
        if change.replica not in self.router.fleet.names:
            self._freed(number_of(change.replica))

    async def _ended(self, change: ReplicaChange) -> str:
        assert change.task is not None, "begun"
        await asyncio.shield(change.task)
        if change.failure is not None:
            raise change.failure
        return change.replica

    # -- the queue ---------------------------------------------------------------------------------------------------------

    async def _follow_queue(self) -> None:
        while self.router.fleet.failure is None:
            await asyncio.sleep(CHECK_S)
            try:
                self._look()
            except RlhubError as error:
                logger.warning("the number of replicas stays as it is: %s", error)

    def _look(self) -> None:
        """Begins the change that the queue calls for, if any and if no other runs."""
        fleet = self.router.fleet
        if fleet.is_paused or not fleet.serving():
            return
        load = self.router.load(self.places, time.monotonic())
        self._most_waiting = max(self._most_waiting, load.waiting)
        decision = self.rule.decide(load, busy=bool(self._running or fleet.starting))
        if decision is not None:
            self._follow(decision)

    def _follow(self, decision: Decision) -> None:
        if decision.action == "add":
            self.begin_add(decision.reason)
        elif (spared := self._spared()) is not None:
            self.begin_remove(spared.name, decision.reason)

    def _spared(self) -> Replica | None:
        """Returns the replica that can be spared best: the one with the least work, none that validation pins."""
        free = [replica for replica in self.router.fleet.serving() if not replica.pins]
        return min(free, key=lambda replica: (replica.cost, -number_of(replica.name)), default=None)

    # -- reports -----------------------------------------------------------------------------------------------------------

    async def update(self, folder: str, version: int) -> Sequence[tuple[str, UpdateReport]]:
        """Loads new weights into all replicas; see Fleet.update."""
        return await self.router.update(folder, version)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the router, the number of changes so far, and the most requests that waited for a place since
        the last call."""
        counts = {f"rollout/replicas_{told}": float(self.counts[kind]) for kind, told in COUNTED.items()}
        waiting, self._most_waiting = self._most_waiting, 0
        queue = {"rollout/waiting_requests": float(waiting)} if self.bounds.by_queue else {}
        return self.router.metrics() | counts | queue

    def describe(self) -> dict[str, Any]:
        """Returns the replicas, the bounds and the newest changes, as JSON-able values."""
        fleet, load = self.router.fleet, self.router.load(self.places, time.monotonic())
        running = [
            {"name": name, "state": replica.state, "version": replica.version, "requests": replica.requests}
            for name, replica in fleet.replicas.items()
        ]
        starting = fleet.starting | {name for name, change in self._running.items() if change.action == "add"}
        starting -= fleet.replicas.keys()
        return {
            "replicas": [*running, *({"name": name, "state": "starting"} for name in sorted(starting))],
            "min_replicas": self.bounds.least,
            "max_replicas": self.bounds.most,
            "follows_queue": self.bounds.by_queue,
            "waiting_requests": load.waiting,
            "changes": [change.to_json() for change in self.changes],
        }

    async def close(self) -> None:
        """Begins no more changes, and ends the replicas with those that run."""
        self._closed = True
        if self._following is not None:
            self._following.cancel()
        await self.router.close()
        if tasks := [change.task for change in self._running.values() if change.task is not None]:
            await asyncio.wait(tasks, timeout=CLOSE_S)


COUNTED = {"add": "added", "remove": "removed", "failed": "failed"}


def name_of(number: int) -> str:
    """Returns the name of the replica with this number."""
    return f"rollout-{number}"


def number_of(name: str) -> int:
    """Returns the number of the replica with this name."""
    return int(name.rpartition("-")[2])
