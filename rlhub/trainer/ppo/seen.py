"""What runs beside the training loop, as spans for the report's Gantt and the trace: publications, and each replica's pause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rlhub.rollout_service.server import UpdateReport
from rlhub.tracking.spans import RecordSpan

PUBLICATION = "publication"


class Replicas(Protocol):
    """The router of the rollout service, as far as publishing goes."""

    async def update(self, folder: str, version: int) -> Sequence[tuple[str, UpdateReport]]:
        """See Router."""
        ...

    def metrics(self) -> dict[str, float]:
        """See Router."""
        ...


class SeenPublication:
    """A Publication whose stretch, and the pause of every replica in it, are recorded."""

    def __init__(self, replicas: Replicas, record: RecordSpan) -> None:
        self._replicas, self._record = replicas, record

    async def update(self, folder: str, version: int) -> None:
        started = time.perf_counter()
        reports = await self._replicas.update(folder, version)
        ended = time.perf_counter()
        self._record(PUBLICATION, f"version {version}", started, ended, replicas=len(reports))
        clock = ended - time.time()  # reports tell the time of day, for they may come from another machine
        for name, report in reports:
            paused = report.paused_at + clock
            self._record(name, "pause", paused, paused + report.pause_s, version=report.version, read_s=report.read_s)

    def metrics(self) -> dict[str, float]:
        return self._replicas.metrics()
