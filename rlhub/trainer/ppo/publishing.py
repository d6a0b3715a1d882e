"""Publication of weights while generation goes on: written once by the training ranks, read by each replica on its own.

The trainer waits only for its own ranks to write.  Replicas read in the background; what they take is part of the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Protocol

from rlhub.utils.timing import PhaseTimer


class Publication(Protocol):
    """What publishes, on its event loop: the rollout service's router."""

    async def update(self, folder: str, version: int) -> object:
        """Every living replica generates with the version in `folder` from now on."""
        ...

    def metrics(self) -> dict[str, float]:
        """Requests, restarts, and for how long replicas paused."""
        ...


class Publisher:
    """write: the training ranks leave their weights in the folder as this version.  fail: told why no version will come any
    more.  One publication at a time.

    loop: the service's, on which everything but the writing happens: whom the version is announced to needs no other thread.
    """

    def __init__(
        self,
        service: Publication,
        loop: asyncio.AbstractEventLoop,
        folder: str,
        *,
        write: Callable[[str, int], object],
        fail: Callable[[BaseException], None],
        timers: PhaseTimer,
    ) -> None:
        self.service, self.folder = service, folder
        self._loop, self._write, self._fail, self._timers = loop, write, fail, timers
        self._under_way: Future[None] | None = None
        self.metrics: dict[str, float] = {}  # of the last publication, and of the service so far

    def publish(self, version: int, announce: Callable[[int], None]) -> None:
        """Returns when the weights are written; the one before must have arrived, since its files may go now.

        announce: told, on the service's loop, that all living replicas have the version.
        """
        self.wait()
        with self._timers.measure("write_weights"):
            self._write(self.folder, version)
        self._under_way = asyncio.run_coroutine_threadsafe(self._deliver(version, announce), self._loop)

    async def _deliver(self, version: int, announce: Callable[[int], None]) -> None:
        started = time.perf_counter()
        try:
            await self.service.update(self.folder, version)
        except Exception as error:
            self._fail(error)  # whoever waits for samples of this version would wait for ever
            raise
        seconds = time.perf_counter() - started
        announce(version)
        self.metrics = {"rollout/publish_s": seconds} | self.service.metrics()

    def wait(self) -> None:
        """Until all living replicas have the version that was published last.  Raises what it failed with."""
        under_way = self._under_way
        if under_way is not None:
            wait_for([under_way])
            self._under_way = None
            under_way.result()

    def close(self) -> None:
        """Returns when nothing is under way."""
        if self._under_way is not None:
            wait_for([self._under_way])
