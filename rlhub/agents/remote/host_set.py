"""HostSet: the actors that run one kind of code of the user's (episodes, environments), kept alive from start to end.

Lives on one event loop, the episodes'.
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

StartHost = Callable[[str], Awaitable["AsyncActor"]]
"""Start the host of this name."""

UNLIMITED = 1 << 20
"""Calls at a time in a host: some wait there for long, and those that they wait for must never wait behind them."""


@dataclass(slots=True, eq=False)
class Host:
    """episodes: how many it serves.  places: how many of them hold one of a limited kind, by kind."""

    name: str
    actor: AsyncActor
    episodes: int = 0
    places: Counter[str] = field(default_factory=Counter)


class HostSet:
    """See the module docstring.  A host that dies is replaced at once, `restarts` times each.

    kind: what they are called in messages and metrics.  prefix: of their names, and of their logs.
    counts: deaths, restarts, and what subclasses count.
    """

    kind = "host"
    prefix = "hosts"

    def __init__(self, start_host: StartHost, num_hosts: int, *, restarts: int = 3, shutdown_s: float = 60.0) -> None:
        self._start_host, self._num_hosts, self._restarts = start_host, num_hosts, restarts
        self._shutdown_s = shutdown_s
        self.hosts: list[Host] = []
        self.counts: Counter[str] = Counter()
        self._restarted: Counter[str] = Counter()
        self._coming = 0  # being started in another's place
        self._starting: set[asyncio.Future[AsyncActor]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: RlhubError | None = None
        self._closed = False

    async def start(self) -> None:
        """Start all of them.  If one cannot start the others are ended too."""
        joining = (self._join(f"{self.prefix}-{number}") for number in range(self._num_hosts))
        failures = [found for found in await asyncio.gather(*joining, return_exceptions=True) if found is not None]
        if failures:
            await self.close()
            raise failures[0]

    async def choose(self) -> Host:
        """The one with the fewest episodes.  Waits while all are being replaced; WorkflowError when none will be any more."""
        while True:
            if self._failure is not None:
                raise self._failure
            self._bury()
            if self.hosts:
                return min(self.hosts, key=lambda host: host.episodes)
            if self._failure is None:
                await self._changed.wait()

    def lost(self, host: Host, why: BaseException | str) -> None:
        """It died or hangs: end it, and start another in its place.  May be told several times."""
        if host not in self.hosts or self._closed:
            return
        self.hosts.remove(host)
        host.actor.kill()
        self.counts["deaths"] += 1
        reason = str(why).partition("\n")[0]
        logger.warning("%s %s with %d episodes is lost: %s", self._called, host.name, host.episodes, reason)
        self._replace(host.name, why)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run; it is ended with the hosts."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all hosts and what they run.  Idempotent."""
        self._closed = True
        if self._failure is None:
            self._failure = WorkflowError(f"the {self._called}s were closed")
        self._notify()
        tasks, hosts, self.hosts = list(self._tasks), self.hosts, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(host) for host in hosts), self._end_unwanted())

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        return {f"rollout/{self.kind}_{name}": float(self.counts[name]) for name in ("deaths", "restarts")}

    @property
    def _called(self) -> str:
        return self.kind.replace("_", " ")

    def _bury(self) -> None:
        """Those that have ended, before anybody was told."""
        for host in [host for host in self.hosts if host.actor.ended]:
            self.lost(host, "its process has ended")

    def _replace(self, name: str, why: BaseException | str) -> None:
        if self._restarted[name] < self._restarts:
            self._restarted[name] += 1
            self.counts["restarts"] += 1
            self._coming += 1
            self.background(self._restart(name))
        elif not self.hosts and not self._coming:
            self._failure = WorkflowError(
                f"all {self._num_hosts} {self._called}s have died, each as often as actor_rollout_ref.rollout.replica_restarts="
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
            self._coming -= 1
        if failed is not None:
            logger.warning("%s %s could not be started again: %s", self._called, name, failed)
            self._replace(name, failed)

    async def _join(self, name: str) -> None:
        starting = asyncio.ensure_future(self._start_host(name))
        self._starting.add(starting)
        try:
            actor = await asyncio.shield(starting)
        except RlhubError:
            self._starting.discard(starting)
            raise
        if self._closed:
            return
        self._starting.discard(starting)
        host = Host(name, actor)
        self.hosts.append(host)
        self.background(self._watch(host))
        self._notify()

    async def _watch(self, host: Host) -> None:
        await host.actor.until_ended()
        self.lost(host, "its process has ended")

    async def _end(self, host: Host) -> None:
        try:
            await host.actor.call("close", deadline_s=self._shutdown_s)
        except (WorkerError, DeadlineError) as error:
            logger.warning("%s %s did not end in order: %s", self._called, host.name, error)
        host.actor.kill()

    async def _end_unwanted(self) -> None:
        """Those that were being started when all were ended."""
        if self._starting:
            done, _ = await asyncio.wait(self._starting, timeout=self._shutdown_s)
            for started in done:
                if started.exception() is None:
                    started.result().kill()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def own_error(error: WorkerError) -> Exception:
    """What the code in a host raised, as it would be without a host, where that can be told; else the WorkerError."""
    if isinstance(error.__cause__, RlhubError) and not isinstance(error, WorkerDiedError):
        own, error.__cause__ = error.__cause__, None
        return own
    if error.remote_type == TimeoutError.__name__:
        return TimeoutError(str(error))
    return error
