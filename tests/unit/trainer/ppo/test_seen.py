"""Publications and pauses of replicas become spans of the driver's clock."""

from __future__ import annotations

import asyncio

import pytest

from rlhub.rollout_service.server import UpdateReport
from rlhub.tracking.spans import SpanLog
from rlhub.trainer.ppo import seen as seen_module
from rlhub.trainer.ppo.seen import SeenPublication


class Clock:
    """Two clocks at the same pace, which stands still unless told."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e9


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_module, "time", CLOCK)


class Replicas:
    """Two replicas that pause one after the other, each for ten seconds."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []

    async def update(self, folder: str, version: int) -> list[tuple[str, UpdateReport]]:
        self.published.append((folder, version))
        reports = []
        for name in ("replica-0", "replica-1"):
            paused_at, pause_s = CLOCK.time(), 10.0
            CLOCK.now += pause_s
            reports.append(
                (name, UpdateReport(version=version, paused_at=paused_at, pause_s=pause_s, read_s=0.5, bytes=8, fingerprint=""))
            )
        return reports

    def metrics(self) -> dict[str, float]:
        return {"rollout/requests": 3.0}


class Failing(Replicas):
    async def update(self, folder: str, version: int) -> list[tuple[str, UpdateReport]]:
        raise RuntimeError("no replica is left")


def test_every_pause_lies_in_its_publication_in_order() -> None:
    log, replicas = SpanLog(), Replicas()
    seen = SeenPublication(replicas, log.record)
    asyncio.run(seen.update("/dev/shm/weights", 7))
    publication, first, second = log.latest()
    assert replicas.published == [("/dev/shm/weights", 7)] and seen.metrics() == {"rollout/requests": 3.0}
    assert (publication.lane, publication.name, publication.args) == ("publication", "version 7", {"replicas": 2})
    assert [(one.lane, one.name) for one in (first, second)] == [("replica-0", "pause"), ("replica-1", "pause")]
    assert first.args == {"version": 7, "read_s": 0.5}
    found = [end for one in (publication, first, second) for end in (one.start, one.end)]
    assert found == pytest.approx([100.0, 120.0, 100.0, 110.0, 110.0, 120.0])


def test_a_publication_that_fails_says_so_itself() -> None:
    log = SpanLog()
    with pytest.raises(RuntimeError, match="no replica is left"):
        asyncio.run(SeenPublication(Failing(), log.record).update("folder", 1))
    assert log.latest() == []
