"""Environments of an episode in an episode actor: it asks the driver for them, as it asks for completions and scores.

The driver leases and calls them for it, so that routing, waiting and restarts are in one place, and a lease ends with the run
of its episode, however that ends: also when the episode's actor dies, which could give nothing back.
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
    """The episode wants to open, call or release an environment; the answer is the result.

    lease: the episode's number for it.  method: OPEN, RELEASE (which waits for no answer) or one of the environment's.
    """

    number: int
    lease: int
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class EnvironmentClient(Protocol):
    """The running episode in its actor."""

    async def call_environment(self, lease: int, method: str, arguments: Mapping[str, Any]) -> Any: ...

    def notify_environment(self, lease: int, method: str) -> None: ...


class DriverEnvironmentSource:
    """The EnvironmentSource of the workflows in an episode actor.  current: the episode that the running code belongs to."""

    def __init__(self, current: Callable[[], EnvironmentClient]) -> None:
        self._current = current
        self._numbers = itertools.count()

    @asynccontextmanager
    async def lease(self, spec: EnvironmentSpec, session: str) -> AsyncIterator[StepEnvironment | Environment]:
        """See EnvironmentSource."""
        episode, lease = self._current(), next(self._numbers)

        def call(method: str, arguments: Mapping[str, Any]) -> Awaitable[Any]:
            return episode.call_environment(lease, method, arguments)

        try:
            await episode.call_environment(lease, OPEN, {"spec": spec, "session": session})
            yield remote_environment(call, offers_tools=spec.offers_tools)
        finally:
            episode.notify_environment(lease, RELEASE)


class EnvironmentRequestHandler:
    """The environments that one run of an episode in an actor leases, on the driver."""

    def __init__(self, source: EnvironmentSource | None) -> None:
        self._table = None if source is None else LeaseTable(source)

    async def handle(self, request: EnvironmentRequest) -> Any:
        """Does what the episode asks for, and returns the result."""
        if self._table is None:
            raise EnvDiedError("the episode asks for an environment of the driver, which lends none")
        if request.method == OPEN:
            return await self._table.open(request.lease, **request.arguments)
        if request.method == RELEASE:
            return await self._table.release(request.lease)
        return await self._table.call(request.lease, request.method, request.arguments)

    async def release_all(self) -> None:
        """Releases all environments: the run is over."""
        if self._table is not None:
            await self._table.release_all()
