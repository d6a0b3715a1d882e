"""Publication of weights while generation goes on: written once by the training ranks, read by each replica on its own.

The trainer waits only for its own ranks to write.  Replicas read in the background, while the next samples are asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Protocol

from rlhub.rollout_service.server import UpdateReport
from rlhub.sharding_manager.route import SyncReport
from rlhub.tracking.spans import RecordSpan, ignore_span
from rlhub.utils.timing import PhaseTimer

PUBLICATION = "publication"
"""Lane of the publications in the report's timeline and the trace; each replica has one of its own for its pauses."""


class Replicas(Protocol):
    """Takes the weights, on its event loop: the rollout service's router."""

    async def update(self, folder: str, version: int) -> Sequence[tuple[str, UpdateReport]]:
        """Gives every living replica the version in `folder`, or at these addresses, to generate with; returns what each reports,
        by its name."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns requests, restarts, and for how long replicas paused."""
        ...


class Publisher:
    """Publishes versions, one at a time.

    loop: the service's, on which everything but the writing happens.  write: the training ranks leave their weights in the
    folder as this version.  fail: called with the error after which no further version will come.  record: called with the span
    of each publication, and of the pause of every replica in it.
    metrics: of the last publication, and of the service so far.
    """

    def __init__(
        self,
        replicas: Replicas,
        loop: asyncio.AbstractEventLoop,
        folder: str,
        *,
        write: Callable[[str, int], Sequence[SyncReport]],
        fail: Callable[[BaseException], None],
        timers: PhaseTimer,
        record: RecordSpan = ignore_span,
    ) -> None:
        self.replicas, self.folder = replicas, folder
        self._loop, self._write, self._fail, self._timers, self._record = loop, write, fail, timers, record
        self._running: Future[None] | None = None
        self._written: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    def publish(self, version: int, announce: Callable[[int], None]) -> None:
        """Returns when the weights are written; waits for the publication before, since its files may go now.

        announce: called on the service's loop once all living replicas have the version.
        """
        self.wait()
        with self._timers.measure("write_weights"):
            reports = self._write(self.folder, version)
        self._written = _written(reports)
        source = ",".join(report.address for report in reports if report.address) or self.folder
        self._running = asyncio.run_coroutine_threadsafe(self._deliver(source, version, announce), self._loop)

    async def _deliver(self, source: str, version: int, announce: Callable[[int], None]) -> None:
        started = time.perf_counter()
        try:
            reports = await self.replicas.update(source, version)
        except Exception as error:
            self._fail(error)  # whoever waits for samples of this version would wait for ever
            raise
        ended = time.perf_counter()
        self._record_spans(version, reports, started, ended)
        announce(version)
        fallbacks = sum(report.fallbacks for _, report in reports)
        own = {"rollout/publish_s": ended - started, "rollout/full_fallbacks": float(fallbacks)}
        self.metrics = own | self._written | self.replicas.metrics()

    def _record_spans(self, version: int, reports: Sequence[tuple[str, UpdateReport]], started: float, ended: float) -> None:
        self._record(PUBLICATION, f"version {version}", started, ended, replicas=len(reports))
        clock = ended - time.time()  # reports tell the time of day, for they may come from another machine
        for name, report in reports:
            paused = report.paused_at + clock
            self._record(name, "pause", paused, paused + report.pause_s, version=report.version, read_s=report.read_s)

    def wait(self) -> None:
        """Waits until all living replicas have the version that was published last.  Raises what its publication failed with."""
        running = self._running
        if running is not None:
            wait_for([running])
            self._running = None
            running.result()

    def close(self) -> None:
        """Waits for a publication that still runs."""
        if self._running is not None:
            wait_for([self._running])


def _written(reports: Sequence[SyncReport]) -> dict[str, float]:
    """Returns the bytes of the ranks' writing, and their share of the bytes of all weights: 1 where each block is in full."""
    stored, whole = sum(report.wire_bytes or 0 for report in reports), sum(report.bytes for report in reports)
    return {"rollout/published_bytes": float(stored), "rollout/published_share": stored / whole if whole else 1.0}
