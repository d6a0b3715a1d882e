"""The actors that run environments, and the leases by which episodes use them.

EnvironmentActors, the pool, lives on the event loop of the episodes.  A lease goes to the actor with the fewest leases that has a
free place, and waits for its turn if none has.  Its episode releases it by leaving the context.  If the episode's own code runs
in an episode actor, the driver holds the lease and releases it when that actor dies.  A lease that is not used for `idle_s` is
revoked: its episode hangs.  The death of an actor fails the episodes whose environment it ran (EnvDiedError), and another actor
replaces it.

EnvironmentActor is the object of an AsyncActor on any machine of the cluster.  Where `num_env_workers` is set, it runs simulators
and tool environments in killable processes, with deadlines and memory limits; all others run on its event loop.  One loop serves
all leases at the same time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.agents.remote.actor_pool import UNLIMITED, ActorPool, PooledActor, StartActor, own_error
from rlhub.envs.base import EnvDiedError, EnvError, Environment, StepEnvironment
from rlhub.envs.child import plain
from rlhub.envs.remote import remote_environment
from rlhub.envs.source import EnvironmentSpec, LeaseTable, LocalEnvironmentSource
from rlhub.errors import DeadlineError, RlhubError, WorkerDiedError, WorkerError
from rlhub.single_controller import AsyncActorOptions, CallObserver, ClassWithInitArgs, astart_async_actor
from rlhub.single_controller.async_actor import AsyncActor
from rlhub.single_controller.resources import Backend
from rlhub.utils.children.process import LOAD_TIMEOUT_S
from rlhub.utils.tool_calls import ToolResult

logger = logging.getLogger(__name__)
GRACE_S = 60.0
"""Time in seconds that an actor has beyond a call's own deadline; an actor that is silent for longer hangs and is replaced."""


class EnvironmentActors(ActorPool):
    """A pool of environment actors, and an EnvironmentSource.

    idle_s: the longest time between two calls of one lease, in which the policy generates its next turn.  counts: also
    taken_back, the number of leases that were revoked after that time.
    """

    kind = "environment actor"
    metric = "rollout/environment_host"
    prefix = "environments"

    def __init__(
        self, start_actor: StartActor, num_actors: int, *, idle_s: float, restarts: int = 3, shutdown_s: float = 60.0
    ) -> None:
        super().__init__(start_actor, num_actors, restarts=restarts, shutdown_s=shutdown_s)
        self.idle_s = idle_s
        self._numbers = itertools.count()
        self._waiting: defaultdict[str, deque[asyncio.Future[PooledActor]]] = defaultdict(deque)
        self._specs: dict[str, EnvironmentSpec] = {}
        self._given_back: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends all actors; environments that were just given back have `shutdown_s` seconds to close.  Idempotent."""
        if self._given_back:
            await asyncio.wait(self._given_back, timeout=self._shutdown_s)
        await super().close()

    @asynccontextmanager
    async def lease(self, spec: EnvironmentSpec, session: str) -> AsyncIterator[StepEnvironment | Environment]:
        """Leases an environment in one of the actors; see EnvironmentSource."""
        lease = ActorLease(self, await self._place(spec), spec, session, next(self._numbers))
        try:
            await lease.open()
            yield remote_environment(lease.call, offers_tools=spec.offers_tools)
        finally:
            lease.release("its episode has given it back")

    async def get_state(self, spec: EnvironmentSpec) -> list[list[Any]]:
        """Returns the states of the pools' simulators, actor by actor.  No call may be in progress."""
        return [await self.call(member, "get_state", spec) for member in self._sorted_members()]

    async def load_state(self, spec: EnvironmentSpec, states: list[list[Any]]) -> None:
        """Restores the states that `get_state` returned for the same number of actors."""
        members = self._sorted_members()
        if len(states) != len(members):
            raise ValueError(f"states of {len(states)} environment actors, but there are {len(members)}")
        for member, state in zip(members, states, strict=True):
            await self.call(member, "load_state", spec, state)

    async def status(self) -> dict[str, EnvironmentActorStatus]:
        """Returns the status of each actor, by name."""
        return {member.name: await self.call(member, "status", within_s=GRACE_S) for member in self._sorted_members()}

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the start, and the current number of leases."""
        counts = {f"{self.metric}_taken_back": float(self.counts["taken_back"])}
        return (
            super().metrics() | counts | {"rollout/environments_leased": float(sum(member.episodes for member in self.members))}
        )

    async def call(self, member: PooledActor, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Calls a method of an actor.  Raises EnvDiedError if the actor dies or is silent, and otherwise the environment's own
        error."""
        try:
            return await member.actor.call(method, *arguments, deadline_s=within_s)
        except (WorkerDiedError, DeadlineError) as error:
            if isinstance(error, WorkerDiedError) and not member.actor.ended:  # the environment's own code raised it
                raise
            self.lost(member, error)
            raise EnvDiedError(f"the environment actor {member.name} has died, and with it the environment") from error
        except WorkerError as error:
            own = own_error(error)
            if own is error:
                raise
            raise own from error

    def give_back(self, closing: Coroutine[Any, Any, None]) -> None:
        """Lets an environment close in its actor, without waiting."""
        task = self.background(closing)
        self._given_back.add(task)
        task.add_done_callback(self._given_back.discard)

    def leave(self, member: PooledActor, spec: EnvironmentSpec) -> None:
        """Frees the place of an episode in the actor."""
        member.episodes -= 1
        member.places[spec.key] -= 1
        self._assign_places()

    async def _place(self, spec: EnvironmentSpec) -> PooledActor:
        """Returns the actor for an episode; episodes are served in the order of their requests."""
        if self._failure is not None:
            raise self._failure
        self._drop_ended()
        turn: asyncio.Future[PooledActor] = asyncio.get_running_loop().create_future()
        self._specs[spec.key] = spec
        self._waiting[spec.key].append(turn)
        self._assign_places()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(turn.result(), spec)
            raise

    def _assign_places(self) -> None:
        """Assigns free places to the episodes that wait."""
        for key, turns in self._waiting.items():
            spec = self._specs[key]
            while turns:
                if turns[0].done():
                    turns.popleft()
                elif self._failure is not None:
                    turns.popleft().set_exception(self._failure)
                elif (member := self._free(spec)) is not None:
                    member.episodes += 1
                    member.places[key] += 1
                    turns.popleft().set_result(member)
                else:
                    break

    def _free(self, spec: EnvironmentSpec) -> PooledActor | None:
        """Returns the actor with the fewest episodes among those with a free place, or None."""
        members = [
            member
            for member in self.members
            if not member.actor.ended and (not spec.places or member.places[spec.key] < spec.places)
        ]
        return min(members, key=lambda member: member.episodes, default=None)

    def _sorted_members(self) -> list[PooledActor]:
        return sorted(self.members, key=lambda member: member.name)

    def _notify(self) -> None:
        super()._notify()
        self._assign_places()


class ActorLease:
    """One environment of an actor, leased by one episode."""

    def __init__(self, pool: EnvironmentActors, member: PooledActor, spec: EnvironmentSpec, session: str, number: int) -> None:
        self._pool, self._member, self._spec, self._session, self._number = pool, member, spec, session, number
        self._ended = ""
        self._num_running = 0
        self._loop = asyncio.get_running_loop()
        self._used = self._loop.time()
        self._timer = self._loop.call_later(pool.idle_s, self._check_idle)

    async def open(self) -> None:
        """Opens the lease in the actor, which may have to start a process for it."""
        within_s = 2 * LOAD_TIMEOUT_S + self._spec.limits.longest_s + GRACE_S
        await self._call_actor("lease", self._spec, self._session, within_s=within_s)

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of the environment.  Calls of tools have no deadline here; their caller sets one."""
        limits = self._spec.limits
        seconds = limits.step_timeout_s if method == "step" else limits.reset_timeout_s
        within_s = None if self._spec.offers_tools else seconds + GRACE_S
        return await self._call_actor("call", method, arguments, within_s=within_s)

    def release(self, why: str) -> None:
        """Ends the lease without waiting for the actor.  Idempotent."""
        if not self._ended:
            self._ended = why
            self._timer.cancel()
            if not self._member.actor.ended:
                self._pool.give_back(self._give_back())
            self._pool.leave(self._member, self._spec)

    async def _call_actor(self, method: str, *arguments: Any, within_s: float | None) -> Any:
        if self._ended:
            raise EnvDiedError(f"the environment of episode {self._session} was taken back: {self._ended}")
        self._num_running += 1
        try:
            return await self._pool.call(self._member, method, self._number, *arguments, within_s=within_s)
        finally:
            self._num_running -= 1
            self._used = self._loop.time()

    async def _give_back(self) -> None:
        with suppress(EnvDiedError):  # with all that it lent
            await self._pool.call(self._member, "release", self._number, within_s=self._spec.limits.longest_s + GRACE_S)

    def _check_idle(self) -> None:
        """Revokes the lease if it has been idle for too long; otherwise schedules the next check."""
        idle_s = self._pool.idle_s
        left = idle_s if self._num_running else self._used + idle_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle)
            return
        self._pool.counts["taken_back"] += 1
        logger.warning("episode %s has not used its environment for %g s: it is taken back", self._session, idle_s)
        self.release(f"it was not used for {idle_s:g} s")


@dataclass(slots=True, kw_only=True)
class EnvironmentActorOptions:
    """The resources and settings with which a run's environment actors start; see AsyncActorOptions.  folder: see
    EnvironmentActor."""

    backend: Backend = "ray"
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    folder: str = ""
    start_s: float = 1800.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()
    observers: Sequence[CallObserver] = ()


def environment_actor_starter(options: EnvironmentActorOptions) -> StartActor:
    """Returns a function that starts actors on the cluster's machines: where the resources they reserve are free, or else on one
    machine after the other."""

    async def start(name: str) -> AsyncActor:
        reserves = options.num_cpus > 0 or options.num_gpus > 0
        own = AsyncActorOptions(
            name=name,
            device="cuda" if options.num_gpus > 0 else "cpu",
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            log_dir=options.log_dir,
            plugins=options.plugins,
            max_concurrency=UNLIMITED,
            start_deadline_s=options.start_s,
            observers=options.observers,
            node_id="" if options.backend != "ray" or reserves else await asyncio.to_thread(_node_of, name),
        )
        return await astart_async_actor(ClassWithInitArgs(EnvironmentActor, options.folder), own, backend=options.backend)

    return start


def _node_of(name: str) -> str:
    """Returns Ray's node id of the machine for the actor with this number."""
    from rlhub.single_controller.ray.nodes import live_nodes

    nodes = sorted(live_nodes(), key=lambda node: node.address)
    return nodes[int(name.rpartition("-")[2]) % len(nodes)].node_id if len(nodes) > 1 else ""


class EnvironmentActor:
    """Runs environments for the leases of an EnvironmentActors pool, which chooses their numbers.

    folder: the driver's working directory, to which relative paths refer.  Where it does not exist, as on a machine without a
    common file system, the process stays in its own directory.
    """

    def __init__(self, folder: str = "") -> None:
        if folder and os.getcwd() != folder and Path(folder).is_dir():
            os.chdir(folder)
        self._own = LocalEnvironmentSource()
        self._leases = LeaseTable(self._own)
        self._seconds: dict[int, float] = {}

    async def lease(self, number: int, spec: EnvironmentSpec, session: str) -> None:
        """Leases an environment to an episode; waits while all are taken.  Raises LoadError if it cannot be built."""
        await self._leases.open(number, spec, session)
        self._seconds[number] = spec.limits.longest_s

    async def call(self, number: int, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of the leased environment by name: reset, step, get_state, load_state, ainitialize, list_tools or
        aexecute."""
        try:
            return _portable(method, await self._leases.call(number, method, arguments))
        except (RlhubError, TimeoutError):
            raise
        except Exception as error:
            if method != "aexecute":
                raise EnvError(f"{method}: {type(error).__name__}: {error}") from error
            # As text here, for its type is known here: its fault is the policy's to read.
            return ToolResult(text=f"Error: {type(error).__name__}: {error}", failed=True)

    async def release(self, number: int) -> None:
        """Ends a lease.  An error or timeout of the environment's own cleanup is logged here."""
        seconds = self._seconds.pop(number, None)
        try:
            async with asyncio.timeout(seconds):
                await self._leases.release(number)
        except TimeoutError:
            logger.warning("an environment did not close within %g s; it is left alone", seconds or 0.0)
        except Exception:  # boundary to the user's code: no call waits for the result
            logger.warning("an environment could not be closed", exc_info=True)

    async def get_state(self, spec: EnvironmentSpec) -> list[Any]:
        """Returns the states of the pool's simulators, None where none runs.  No call may be in progress."""
        return await self._own.pool(spec).get_state()

    async def load_state(self, spec: EnvironmentSpec, states: list[Any]) -> None:
        """Restores the states that `get_state` returned."""
        await self._own.pool(spec).load_state(states)

    async def status(self) -> EnvironmentActorStatus:
        """Returns the current status of this actor."""
        return EnvironmentActorStatus(
            alive=sum(pool.num_alive for pool in self._own.pools),
            leased=len(self._leases),
            replaced=sum(pool.num_replaced for pool in self._own.pools),
            calls=self._leases.calls,
        )

    async def close(self) -> None:
        """Ends all leases and all processes."""
        await self._leases.release_all()
        await self._own.aclose()


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvironmentActorStatus:
    """The status of an environment actor.

    alive: the number of running processes.  leased: the number of environments that episodes lease.  replaced: the number of
    processes that replaced one that died.  calls: the number of calls of environments' methods since the start.
    """

    alive: int
    leased: int
    replaced: int
    calls: int


def _portable(method: str, value: Any) -> Any:
    """Returns a result in a form that can be sent: of an environment's info only the entries with a JSON form."""
    if method not in ("reset", "step"):
        return value
    *found, info = value
    return (*found, plain(info) if info else info)
