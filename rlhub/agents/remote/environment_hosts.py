"""EnvironmentHosts: the actors that run environments, and the episodes' way to them.  Lives on one event loop, the episodes'.

A lease goes to the host with the fewest that has a place free, and waits for its turn where none has.  Whoever holds it gives
it back by leaving its context, however the episode ends; where the episode's own code runs in an episode host, the driver holds
the leases for it, and gives them back when that host dies.  One that is not used for `idle_s` is taken back: its holder hangs.
A host's death fails the episodes that have an environment there (EnvDiedError), and another one is started in its place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rlhub.agents.remote.environment_host import EnvironmentHost, EnvironmentHostStatus
from rlhub.agents.remote.host_set import UNLIMITED, Host, HostSet, StartHost, own_error
from rlhub.envs.base import EnvDiedError, Environment, StepEnvironment
from rlhub.envs.remote import remote_environment
from rlhub.envs.source import EnvironmentSpec
from rlhub.errors import DeadlineError, WorkerDiedError, WorkerError
from rlhub.single_controller import AsyncActorOptions, ClassWithInitArgs, astart_async_actor
from rlhub.single_controller.async_actor import AsyncActor
from rlhub.single_controller.resources import Backend
from rlhub.utils.children.process import LOAD_TIMEOUT_S

logger = logging.getLogger(__name__)

GRACE_S = 60.0
"""How much longer than a call's own deadline a host may be silent: one that is hangs, and is lost."""


class EnvironmentHosts(HostSet):
    """An EnvironmentSource; see the module docstring and HostSet.

    idle_s: longest time between two calls of one lease, in which the policy generates its next turn.
    counts: also taken_back, the leases that were not used for so long.
    """

    kind = "environment_host"
    prefix = "environments"

    def __init__(
        self, start_host: StartHost, num_hosts: int, *, idle_s: float, restarts: int = 3, shutdown_s: float = 60.0
    ) -> None:
        super().__init__(start_host, num_hosts, restarts=restarts, shutdown_s=shutdown_s)
        self.idle_s = idle_s
        self._numbers = itertools.count()
        self._waiting: defaultdict[str, deque[asyncio.Future[Host]]] = defaultdict(deque)
        self._specs: dict[str, EnvironmentSpec] = {}

    @asynccontextmanager
    async def lease(self, spec: EnvironmentSpec, session: str) -> AsyncIterator[StepEnvironment | Environment]:
        """See EnvironmentSource."""
        lease = _Lease(self, await self._place(spec), spec, session, next(self._numbers))
        try:
            await lease.open()
            yield remote_environment(lease.call, offers_tools=spec.offers_tools)
        finally:
            lease.release("its episode has given it back")

    async def get_state(self, spec: EnvironmentSpec) -> list[list[Any]]:
        """Returns the states of the pools' simulators, host by host.  No call may be in progress."""
        return [await self.ask(host, "get_state", spec) for host in self._in_order()]

    async def load_state(self, spec: EnvironmentSpec, states: list[list[Any]]) -> None:
        """Go on from `get_state` of as many hosts."""
        hosts = self._in_order()
        if len(states) != len(hosts):
            raise ValueError(f"states of {len(states)} environment hosts, but there are {len(hosts)}")
        for host, state in zip(hosts, states, strict=True):
            await self.ask(host, "load_state", spec, state)

    async def status(self) -> dict[str, EnvironmentHostStatus]:
        """What runs in each host."""
        return {host.name: await self.ask(host, "status", within_s=GRACE_S) for host in self._in_order()}

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the leases of this moment."""
        counts = {f"rollout/{self.kind}_taken_back": float(self.counts["taken_back"])}
        return super().metrics() | counts | {"rollout/environments_leased": float(sum(host.episodes for host in self.hosts))}

    async def ask(self, host: Host, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """A method of the host.  EnvDiedError where it dies or is silent; what the environment raises, as it raised it."""
        try:
            return await host.actor.call(method, *arguments, deadline_s=within_s)
        except (WorkerDiedError, DeadlineError) as error:
            if isinstance(error, WorkerDiedError) and not host.actor.ended:  # the environment's own code raised it
                raise
            self.lost(host, error)
            raise EnvDiedError(f"the environment host {host.name} has died, and with it the environment") from error
        except WorkerError as error:
            own = own_error(error)
            if own is error:
                raise
            raise own from error

    def leave(self, host: Host, spec: EnvironmentSpec) -> None:
        """An episode's place there is free."""
        host.episodes -= 1
        host.places[spec.key] -= 1
        self._hand_out()

    async def _place(self, spec: EnvironmentSpec) -> Host:
        """A place for an episode, in the order of asking."""
        if self._failure is not None:
            raise self._failure
        self._bury()
        turn: asyncio.Future[Host] = asyncio.get_running_loop().create_future()
        self._specs[spec.key] = spec
        self._waiting[spec.key].append(turn)
        self._hand_out()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(turn.result(), spec)
            raise

    def _hand_out(self) -> None:
        """Give free places to those who wait."""
        for key, turns in self._waiting.items():
            spec = self._specs[key]
            while turns:
                if turns[0].done():
                    turns.popleft()
                elif self._failure is not None:
                    turns.popleft().set_exception(self._failure)
                elif (host := self._free(spec)) is not None:
                    host.episodes += 1
                    host.places[key] += 1
                    turns.popleft().set_result(host)
                else:
                    break

    def _free(self, spec: EnvironmentSpec) -> Host | None:
        """The host with the fewest episodes of those with a place."""
        hosts = [host for host in self.hosts if not host.actor.ended and (not spec.places or host.places[spec.key] < spec.places)]
        return min(hosts, key=lambda host: host.episodes, default=None)

    def _in_order(self) -> list[Host]:
        return sorted(self.hosts, key=lambda host: host.name)

    def _notify(self) -> None:
        super()._notify()
        self._hand_out()


class _Lease:
    """One environment of a host, for one episode."""

    def __init__(self, hosts: EnvironmentHosts, host: Host, spec: EnvironmentSpec, session: str, number: int) -> None:
        self._hosts, self._host, self._spec, self._session, self._number = hosts, host, spec, session, number
        self._ended = ""
        self._under_way = 0
        self._loop = asyncio.get_running_loop()
        self._used = self._loop.time()
        self._timer = self._loop.call_later(hosts.idle_s, self._look)

    async def open(self) -> None:
        """Have the host lend it; its process may have to start."""
        within_s = 2 * LOAD_TIMEOUT_S + self._spec.limits.longest_s + GRACE_S
        await self._ask("lease", self._spec, self._session, within_s=within_s)

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """A method of the environment.  Tools' deadlines are the caller's."""
        limits = self._spec.limits
        seconds = limits.step_timeout_s if method == "step" else limits.reset_timeout_s
        within_s = None if self._spec.offers_tools else seconds + GRACE_S
        return await self._ask("call", method, arguments, within_s=within_s)

    def release(self, why: str) -> None:
        """Give it back, without waiting for its end.  Idempotent."""
        if not self._ended:
            self._ended = why
            self._timer.cancel()
            if not self._host.actor.ended:
                self._hosts.background(self._give_back())
            self._hosts.leave(self._host, self._spec)

    async def _ask(self, method: str, *arguments: Any, within_s: float | None) -> Any:
        if self._ended:
            raise EnvDiedError(f"the environment of episode {self._session} was taken back: {self._ended}")
        self._under_way += 1
        try:
            return await self._hosts.ask(self._host, method, self._number, *arguments, within_s=within_s)
        finally:
            self._under_way -= 1
            self._used = self._loop.time()

    async def _give_back(self) -> None:
        with suppress(EnvDiedError):  # with all that it lent
            await self._hosts.ask(self._host, "release", self._number, within_s=self._spec.limits.longest_s + GRACE_S)

    def _look(self) -> None:
        """Whether it is still used; again when that can have changed."""
        idle_s = self._hosts.idle_s
        left = idle_s if self._under_way else self._used + idle_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        self._hosts.counts["taken_back"] += 1
        logger.warning("episode %s has not used its environment for %g s: it is taken back", self._session, idle_s)
        self.release(f"it was not used for {idle_s:g} s")


@dataclass(slots=True, kw_only=True)
class EnvironmentHostOptions:
    """How the hosts of a run are started; see AsyncActorOptions.  folder: see EnvironmentHost."""

    backend: Backend = "ray"
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    folder: str = ""
    start_s: float = 1800.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()


def environment_host_starter(options: EnvironmentHostOptions) -> StartHost:
    """Hosts on the cluster's machines: where what they reserve is free, else on one machine after the other."""

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
        return await astart_async_actor(ClassWithInitArgs(EnvironmentHost, options.folder), own, backend=options.backend)

    return start


def _node_of(name: str) -> str:
    """Ray's name of the machine for the host with this number."""
    from rlhub.single_controller.ray.nodes import live_nodes

    nodes = sorted(live_nodes(), key=lambda node: node.address)
    return nodes[int(name.rpartition("-")[2]) % len(nodes)].node_id if len(nodes) > 1 else ""
