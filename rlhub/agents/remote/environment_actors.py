"""The actors that run environments, and the episodes' way to them.

`EnvironmentActor` is the object of an AsyncActor on any machine of the cluster.  Simulators and tool environments stay in
killable processes of its own (the pool's), with their deadlines and memory limits, where `num_env_workers` is set; others run
on its event loop.  One loop serves all leases at the same time.

`EnvironmentActors` lives on one event loop, the episodes'.  A lease goes to the actor with the fewest that has a place free,
and waits for its turn where none has.  Its episode gives it back by leaving the context, however it ends; where the episode's
own code runs in an episode actor, the driver has the leases, and gives them back when that actor dies.  One that is not used
for `idle_s` is taken back: its episode hangs.  An actor's death fails the episodes that have an environment there
(EnvDiedError), and another one is started in its place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping
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
from rlhub.single_controller import AsyncActorOptions, ClassWithInitArgs, astart_async_actor
from rlhub.single_controller.async_actor import AsyncActor
from rlhub.single_controller.resources import Backend
from rlhub.utils.children.process import LOAD_TIMEOUT_S
from rlhub.utils.tool_calls import ToolResult

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvironmentActorStatus:
    """The state of an environment actor.

    alive: processes that are up.  leased: environments that episodes hold.  replaced: processes that came after one that died.
    calls: of environments' methods, since the start.
    """

    alive: int
    leased: int
    replaced: int
    calls: int


class EnvironmentActor:
    """See the module docstring.  Callers choose the numbers of their leases.

    folder: the driver's working directory, from which relative paths count; where there is no such folder, as on a machine
    without a common file system, the process stays where it is.
    """

    def __init__(self, folder: str = "") -> None:
        if folder and os.getcwd() != folder and Path(folder).is_dir():
            os.chdir(folder)
        self._own = LocalEnvironmentSource()
        self._leases = LeaseTable(self._own)
        self._seconds: dict[int, float] = {}

    async def lease(self, number: int, spec: EnvironmentSpec, session: str) -> None:
        """Lends an environment to an episode; waits while all are taken.  LoadError if it cannot be made."""
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
        """Takes the environment back.  What its own end raises, or does not do in time, is logged here."""
        seconds = self._seconds.pop(number, None)
        try:
            async with asyncio.timeout(seconds):
                await self._leases.release(number)
        except TimeoutError:
            logger.warning("an environment did not close within %g s; it is left alone", seconds or 0.0)
        except Exception:  # boundary to code of the user's: nobody waits for the result
            logger.warning("an environment could not be closed", exc_info=True)

    async def get_state(self, spec: EnvironmentSpec) -> list[Any]:
        """Returns the states of the pool's simulators, None where none runs.  No call may be in progress."""
        return await self._own.pool(spec).get_state()

    async def load_state(self, spec: EnvironmentSpec, states: list[Any]) -> None:
        """Restores the states that `get_state` gave."""
        await self._own.pool(spec).load_state(states)

    async def status(self) -> EnvironmentActorStatus:
        """Returns what runs here now."""
        return EnvironmentActorStatus(
            alive=sum(pool.num_alive for pool in self._own.pools),
            leased=len(self._leases),
            replaced=sum(pool.num_replaced for pool in self._own.pools),
            calls=self._leases.calls,
        )

    async def close(self) -> None:
        """Takes all environments back and ends all processes."""
        await self._leases.release_all()
        await self._own.aclose()


def _portable(method: str, value: Any) -> Any:
    """Returns a result as it can travel: of an environment's info only what has a plain form."""
    if method not in ("reset", "step"):
        return value
    *found, info = value
    return (*found, plain(info) if info else info)


GRACE_S = 60.0
"""Silence of an actor after a call's own deadline: one that is silent for longer hangs, and is lost."""


class EnvironmentActors(ActorPool):
    """An EnvironmentSource; see the module docstring and ActorPool.

    idle_s: longest time between two calls of one lease, in which the policy generates its next turn.
    counts: also taken_back, the leases that were not used for so long.
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

    @asynccontextmanager
    async def lease(self, spec: EnvironmentSpec, session: str) -> AsyncIterator[StepEnvironment | Environment]:
        """See EnvironmentSource."""
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
        """Restores the states that `get_state` gave of as many actors."""
        members = self._sorted_members()
        if len(states) != len(members):
            raise ValueError(f"states of {len(states)} environment actors, but there are {len(members)}")
        for member, state in zip(members, states, strict=True):
            await self.call(member, "load_state", spec, state)

    async def status(self) -> dict[str, EnvironmentActorStatus]:
        """Returns what runs in each actor."""
        return {member.name: await self.call(member, "status", within_s=GRACE_S) for member in self._sorted_members()}

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the start, and the number of leases now."""
        counts = {f"{self.metric}_taken_back": float(self.counts["taken_back"])}
        return (
            super().metrics() | counts | {"rollout/environments_leased": float(sum(member.episodes for member in self.members))}
        )

    async def call(self, member: PooledActor, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Calls a method of the actor.  EnvDiedError where it dies or is silent; what the environment raises, as it raised it."""
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

    def leave(self, member: PooledActor, spec: EnvironmentSpec) -> None:
        """Frees an episode's place in the actor."""
        member.episodes -= 1
        member.places[spec.key] -= 1
        self._assign_places()

    async def _place(self, spec: EnvironmentSpec) -> PooledActor:
        """Returns the actor for an episode; episodes are served in the order of asking."""
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
        """Gives free places to the episodes that wait."""
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
        """Returns the actor with the fewest episodes of those with a place."""
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
        """Leases the environment from the actor; its process may have to start."""
        within_s = 2 * LOAD_TIMEOUT_S + self._spec.limits.longest_s + GRACE_S
        await self._call_actor("lease", self._spec, self._session, within_s=within_s)

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of the environment.  Tools' deadlines are the caller's."""
        limits = self._spec.limits
        seconds = limits.step_timeout_s if method == "step" else limits.reset_timeout_s
        within_s = None if self._spec.offers_tools else seconds + GRACE_S
        return await self._call_actor("call", method, arguments, within_s=within_s)

    def release(self, why: str) -> None:
        """Gives it back, without waiting for its end.  Idempotent."""
        if not self._ended:
            self._ended = why
            self._timer.cancel()
            if not self._member.actor.ended:
                self._pool.background(self._give_back())
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
        """Takes the lease back if it was not used for long; looks again when it may have to."""
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
    """How the environment actors of a run are started; see AsyncActorOptions.  folder: see EnvironmentActor."""

    backend: Backend = "ray"
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    folder: str = ""
    start_s: float = 1800.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()


def environment_actor_starter(options: EnvironmentActorOptions) -> StartActor:
    """Returns how to start actors on the cluster's machines: where what they reserve is free, else on one after the other."""

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
            node_id="" if options.backend != "ray" or reserves else await asyncio.to_thread(_node_of, name),
        )
        return await astart_async_actor(ClassWithInitArgs(EnvironmentActor, options.folder), own, backend=options.backend)

    return start


def _node_of(name: str) -> str:
    """Returns Ray's name of the machine for the actor with this number."""
    from rlhub.single_controller.ray.nodes import live_nodes

    nodes = sorted(live_nodes(), key=lambda node: node.address)
    return nodes[int(name.rpartition("-")[2]) % len(nodes)].node_id if len(nodes) > 1 else ""
