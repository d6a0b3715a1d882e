"""Messages by which an episode in an episode actor uses the driver's environments, as it uses the driver's engine and reward.

The driver leases the environments and calls them for the episode, so that routing, waiting and restarts stay in one place.  A
lease ends with the run of its episode, even if the episode's actor dies and cannot release it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhub.envs.base import EnvDiedError, Environment, StepEnvironment
from rlhub.envs.remote import remote_environment
from rlhub.envs.source import EnvironmentSource, EnvironmentSpec, LeaseTable

OPEN, RELEASE = "open", "release"


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvironmentRequest:
    """A request of the episode to open, call or release an environment; the response is the result of that.

    lease: the number of the lease, which the episode chooses.  method: OPEN, RELEASE (which has no response) or a method of the
    environment.
    """

    number: int
    lease: int
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class EnvironmentClient(Protocol):
    """The running episode in its actor, which sends the requests."""

    async def call_environment(self, lease: int, method: str, arguments: Mapping[str, Any]) -> Any:
        """Sends a request and returns its result."""
        ...

    def notify_environment(self, lease: int, method: str) -> None:
        """Sends a request that has no response."""
        ...


class DriverEnvironmentSource:
    """An EnvironmentSource for workflows in an episode actor, which leases the driver's environments.

    current: returns the episode that the running code belongs to.
    """

    def __init__(self, current: Callable[[], EnvironmentClient]) -> None:
        self._current = current
        self._numbers = itertools.count()

    @asynccontextmanager
    async def lease(self, spec: EnvironmentSpec, session: str) -> AsyncIterator[StepEnvironment | Environment]:
        """Leases an environment of the driver; see EnvironmentSource."""
        episode, lease = self._current(), next(self._numbers)

        def call(method: str, arguments: Mapping[str, Any]) -> Awaitable[Any]:
            return episode.call_environment(lease, method, arguments)

        try:
            await episode.call_environment(lease, OPEN, {"spec": spec, "session": session})
            yield remote_environment(call, offers_tools=spec.offers_tools)
        finally:
            episode.notify_environment(lease, RELEASE)


class EnvironmentRequestHandler:
    """Serves the environment requests of one run of an episode, on the driver.  source: None if the driver has no
    environments."""

    def __init__(self, source: EnvironmentSource | None) -> None:
        self._table = None if source is None else LeaseTable(source)

    async def handle(self, request: EnvironmentRequest) -> Any:
        """Executes a request and returns its result.  Raises EnvDiedError if the driver has no environments."""
        if self._table is None:
            raise EnvDiedError("the episode asks for an environment of the driver, which lends none")
        if request.method == OPEN:
            return await self._table.open(request.lease, **request.arguments)
        if request.method == RELEASE:
            return await self._table.release(request.lease)
        return await self._table.call(request.lease, request.method, request.arguments)

    async def release_all(self) -> None:
        """Releases all environments that the run still leases."""
        if self._table is not None:
            await self._table.release_all()
