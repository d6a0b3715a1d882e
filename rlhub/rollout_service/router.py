"""Router: one engine in front of all replicas of the rollout service.  Episodes, servers and validation generate through it.

A request goes to the replica with the least running work, counted in tokens; the requests of one session go to the same replica,
which caches the session's prefix.  When a replica dies, its requests start again on another one.  Equal seeds give equal noise,
so under the same weights the completion is the same.  The tokens that the dead replica had sampled are lost and counted; a
streamed request continues after the tokens that its follower has received.

An episode in another process gets the replica from here and generates there by itself (`aplace`): its tokens take no way through
this process, which chooses, counts and repeats as for any other request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar, cast

from rlhub.agents.remote.streaming import StreamedRequest
from rlhub.agents.workflows.base import Generated, RemoteGeneration
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, Progress, SamplingParams
from rlhub.errors import DeadlineError, EngineError, WorkerDiedError, WorkerError
from rlhub.rollout_service.elastic import ReplicaLoad
from rlhub.rollout_service.fleet import Fleet, FleetLimits, StartReplica
from rlhub.rollout_service.replica import Replica
from rlhub.rollout_service.server import UpdateReport

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=Completion | Generated)

MAX_SESSIONS = 1 << 16
"""Maximum number of sessions whose replica is remembered; beyond it the least recently used ones are routed again."""
CLOSE_S = 5.0
"""Time in seconds in which open requests fail when the service closes."""


@dataclass(slots=True, frozen=True)
class _Task(Generic[T]):
    """A request and what sends it to a replica.  cost: see Replica.  streamed: continues where a dead replica stopped."""

    session: str
    cost: int
    attempt: Callable[[Replica], Awaitable[T]]
    streamed: StreamedRequest | None = None


class Router:
    """Routes requests to replicas.  It implements `PlacingEngine` and lives on one event loop, on which all methods are called.

    retries: the maximum number of repetitions of a request whose replica died.  generate_s: maximum wait for a completion; a
    replica that needs longer hangs and is ended.  max_sessions: the number of sessions that are remembered.  own_weights: see
    Fleet.
    """

    def __init__(
        self,
        start_replica: StartReplica,
        limits: FleetLimits | None = None,
        *,
        retries: int = 3,
        generate_s: float | None = None,
        max_sessions: int = MAX_SESSIONS,
        own_weights: bool = False,
    ) -> None:
        self.fleet = Fleet(start_replica, limits or FleetLimits(), own_weights=own_weights)
        self.counts: Counter[str] = Counter()
        self._retries, self._generate_s, self._max_sessions = retries, generate_s, max_sessions
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._numbers = itertools.count()
        self._num_running, self._idle = 0, asyncio.Event()
        self._idle.set()

    # -- requests ----------------------------------------------------------------------------------------------------------

    async def agenerate(
        self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None, *, pin: Pin | None = None
    ) -> Completion:
        """Generates one completion.  Waits while no replica serves; raises the fleet's `failure` if none ever will again.

        pin: a view whose replica generates; None: any one.
        """
        request = replace(request, request_id=request.request_id or self._new_id())
        streamed = StreamedRequest(request, params, follow) if follow is not None else None

        async def attempt(replica: Replica) -> Completion:
            if streamed is not None:
                return streamed.whole(await self._generate_streaming(replica, streamed.again(), params, streamed))
            found: Completion = await replica.actor.call("agenerate", request, params, deadline_s=self._generate_s)
            return found

        task = _Task(request.session, len(request.prompt_ids) + params.max_new_tokens, attempt, streamed)
        return await self._tracked(task, pin)

    async def aplace(self, generation: RemoteGeneration, *, pin: Pin | None = None) -> Generated:
        """Chooses a replica, and lets the process of the episode generate there; waits and raises as `agenerate`."""
        request_id = generation.request_id or self._new_id()

        async def attempt(replica: Replica) -> Generated:
            return await generation.send(replica.actor, request_id, self._generate_s)

        return await self._tracked(_Task(generation.session, generation.cost, attempt), pin)

    def _new_id(self) -> str:
        return f"r{next(self._numbers)}"

    async def _tracked(self, task: _Task[T], pin: Pin | None) -> T:
        self._num_running += 1
        self._idle.clear()
        try:
            return await self._with_retries(task, pin)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def _with_retries(self, task: _Task[T], pin: Pin | None) -> T:
        self.counts["requests"] += 1
        wasted_s = 0.0
        for attempt in itertools.count():
            chosen = await self._choose(task.session) if pin is None else await pin.place()
            started = time.monotonic()
            try:
                found = await self._generate(chosen, task)
            except (WorkerDiedError, DeadlineError) as error:
                self.fleet.lost(chosen, error)
                wasted_s += time.monotonic() - started
                if attempt >= self._retries:
                    raise
                self.counts["retries"] += 1
                if task.streamed is None:
                    continue
                wasted_s = 0.0
                if (finished := task.streamed.finished()) is None:
                    continue
                found = cast("T", finished)  # streamed, so a Completion
            self._count(found, wasted_s, time.monotonic() - started)
            return found
        raise AssertionError("unreachable")

    async def _generate(self, replica: Replica, task: _Task[T]) -> T:
        replica.begin(task.cost)
        try:
            return await task.attempt(replica)
        except (WorkerDiedError, DeadlineError):
            raise
        except WorkerError as error:
            if await self.fleet.check_status(replica) is None:  # the engine failed, not this request alone
                raise WorkerDiedError(str(error), role=error.role, rank=error.rank, node=error.node) from error
            raise
        finally:
            replica.end(task.cost)

    async def _generate_streaming(
        self, replica: Replica, request: GenerationRequest, params: SamplingParams, streamed: StreamedRequest
    ) -> Completion:
        """Returns the completion, and streams its tokens until then."""
        name = f"f{next(self._numbers)}"
        call = replica.actor.call("agenerate", request, params, name, deadline_s=self._generate_s)
        generating = asyncio.ensure_future(call)
        streaming = asyncio.ensure_future(_send_progress(replica, name, streamed))
        try:
            await asyncio.wait({generating, streaming}, return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()  # raises what the follower raised
            return cast("Completion", await generating)
        finally:
            generating.cancel()
            streaming.cancel()

    def _count(self, found: Completion | Generated, wasted_s: float, seconds: float) -> None:
        """Counts the tokens of a request. lost_tokens is an estimate: the time of the failed attempts at the speed of the
        successful one."""
        sampled = found.num_tokens if isinstance(found, Generated) else len(found.token_ids)
        self.counts["completed"] += 1
        self.counts["tokens"] += sampled
        if wasted_s:
            self.counts["lost_tokens"] += min(sampled, round(sampled * wasted_s / max(seconds, 1e-6)))

    async def _choose(self, session: str) -> Replica:
        while True:
            self.fleet.raise_failure()
            home = self.fleet.replicas.get(self._sessions.get(session, "")) if session else None
            if home is not None and self.fleet.serves(home):
                self._sessions.move_to_end(session)
                return home
            if serving := self.fleet.serving():
                chosen = min(serving, key=lambda replica: (replica.cost, replica.requests))
                self._remember_session(session, chosen)
                return chosen
            await self.fleet.changed()

    def _remember_session(self, session: str, chosen: Replica) -> None:
        """Records the replica for the session's next request."""
        if session:
            self._sessions[session] = chosen.name
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)

    # -- replicas ----------------------------------------------------------------------------------------------------------

    async def add(self, name: str) -> None:
        """Starts a replica; it serves as soon as it has the newest weights."""
        await self.fleet.add(name)

    async def remove(self, name: str) -> None:
        """Removes a replica once its requests have completed; new ones go to other replicas from now on."""
        await self.fleet.remove(name)

    async def restart(self, name: str) -> None:
        """Replaces a replica by a new one."""
        await self.fleet.restart(name)

    async def update(self, folder: str, version: int) -> list[tuple[str, UpdateReport]]:
        """Loads new weights into all replicas; see Fleet.update."""
        return await self.fleet.update(folder, version)

    async def pause(self) -> None:
        """Stops sampling in all replicas; requests keep their tokens and wait."""
        await self.fleet.pause()

    async def resume(self) -> None:
        """Continues sampling in all replicas."""
        await self.fleet.resume()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Aborts the requests with these ids: they return the tokens that they have, with the finish reason "abort"."""
        await self.fleet.abort(request_ids)

    async def pin(self, version: int) -> Pin:
        """Returns a view that generates with `version`, whatever is published, until its release; validation uses it during
        training.

        One replica stays at the version, and serves no other requests once newer weights are published.  If it is the only
        replica, updates wait for the release.  Raises EngineError if no replica has the version (pin it before the next one is
        published) or if another version is pinned.
        """
        return Pin(self, await self._pin_replica(version), version)

    async def _pin_replica(self, version: int) -> Replica:
        """Pins the replica that is already pinned, or else the one with the least work of those that have the version.  Waits if
        none has the version now but starting replicas will load it."""
        while True:
            self.fleet.raise_failure()
            pinned = [replica for replica in self.fleet.replicas.values() if replica.pins]
            if pinned and pinned[0].version != version:
                raise EngineError(f"version {pinned[0].version} is pinned; release it before version {version} is pinned")
            serving = [replica for replica in self.fleet.replicas.values() if replica.state == "serving"]
            holders = pinned or [replica for replica in serving if replica.version == version and not replica.turn.locked()]
            if holders:
                chosen = min(holders, key=lambda replica: (replica.cost, replica.requests))
                chosen.pins += 1
                return chosen
            if self.fleet.newest is None or self.fleet.newest.version != version:
                held = ", ".join(f"{replica.name} {replica.version}" for replica in serving) or "none serves"
                raise EngineError(f"no replica has version {version} ({held}); pin a version before the next one is published")
            await self.fleet.changed()

    def load(self, places: int, at: float) -> ReplicaLoad:
        """Returns the load at the time `at` for the rule of elastic.py.  places: the requests that a replica runs at once."""
        replicas, newest = self.fleet.replicas.values(), self.fleet.newest
        running = sum(min(replica.requests, places) for replica in replicas)
        return ReplicaLoad(
            at=at,
            replicas=sum(replica.state != "leaving" for replica in replicas) + len(self.fleet.starting),
            waiting=self._num_running - running,
            running=running,
            completed=self.counts["completed"],
            publication=newest.number if newest is not None else None,
        )

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the start, and the times of the last weight update."""
        pauses = [report.pause_s for _, report in self.fleet.updates]
        replicas = self.fleet.replicas.values()
        metrics = {f"rollout/{name}": float(self.counts[name]) for name in ("requests", "tokens", "retries", "lost_tokens")}
        metrics |= {f"rollout/replica_{name}": float(self.fleet.counts[name]) for name in ("deaths", "restarts")}
        metrics |= {
            "rollout/replicas": float(len(replicas)),
            "rollout/requests_under_way": float(self._num_running),
        }
        if pauses:
            metrics["rollout/pause_s"] = sum(pauses) / len(pauses)
            metrics["rollout/pause_s_max"] = max(pauses)
            metrics["rollout/update_s"] = max(report.read_s for _, report in self.fleet.updates)
        return metrics

    async def close(self) -> None:
        """Ends all replicas; running requests fail."""
        await self.fleet.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), CLOSE_S)


async def _send_progress(replica: Replica, name: str, streamed: StreamedRequest) -> None:
    have = 0
    while True:
        try:
            progress: Progress | None = await replica.actor.call("progress", name, have)
        except WorkerError:  # the request's own call raises what happened
            return
        if progress is None:
            return
        have += len(progress.token_ids)
        streamed.send_on(progress)


class Pin:
    """A view of the router that generates with one version.  It is an asynchronous context manager and implements
    `PlacingEngine`."""

    def __init__(self, router: Router, replica: Replica, version: int) -> None:
        self.version = version
        self._router, self._replica = router, replica
        self._released = False
        self._turn = asyncio.Lock()

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Generates one completion, whose tokens are all sampled by the pinned version."""
        return await self._router.agenerate(request, params, follow, pin=self)

    async def aplace(self, generation: RemoteGeneration) -> Generated:
        """Lets the process of an episode generate with the pinned version."""
        return await self._router.aplace(generation, pin=self)

    async def place(self) -> Replica:
        """Returns the pinned replica.  If it died, pins another one that has the version; raises EngineError if there is none."""
        async with self._turn:
            self._refuse_released()
            if self._replica.state == "dead":
                found = await self._router._pin_replica(self.version)
                self._refuse_released(found)
                self._replica = found
            return self._replica

    def _refuse_released(self, found: Replica | None = None) -> None:
        """Raises EngineError if the pin was released.  found: a replica that was pinned for this view meanwhile, and is unpinned
        again."""
        if self._released:
            if found is not None:
                self._router.fleet.unpin(found)
            raise EngineError(f"the pin of version {self.version} was released; pin the version anew")

    def release(self) -> None:
        """Unpins the replica, which then loads the newest weights.  Idempotent."""
        if not self._released:
            self._released = True
            self._router.fleet.unpin(self._replica)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.release()
