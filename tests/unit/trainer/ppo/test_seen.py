"""Publications and pauses of replicas become spans of the driver's clock."""

from __future__ import annotations

import time

import pytest

from rlhub.tracking.spans import SpanLog
from rlhub.trainer.ppo.seen import SeenPublication
from rlhub.workers.rollout_server import UpdateReport


class Replicas:
    """Two replicas that pause one after the other, each for 10 ms."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []

    def publish(self, folder: str, version: int) -> list[tuple[str, UpdateReport]]:
        self.published.append((folder, version))
        reports = []
        for name in ("replica-0", "replica-1"):
            paused_at = time.time()
            time.sleep(0.01)
            pause_s = time.time() - paused_at
            reports.append(
                (name, UpdateReport(version=version, paused_at=paused_at, pause_s=pause_s, read_s=0.5, bytes=8, fingerprint=""))
            )
        return reports

    def metrics(self) -> dict[str, float]:
        return {"rollout/requests": 3.0}


class Failing(Replicas):
    def publish(self, folder: str, version: int) -> list[tuple[str, UpdateReport]]:
        raise RuntimeError("no replica is left")


def test_every_pause_lies_in_its_publication_in_order() -> None:
    log, replicas = SpanLog(), Replicas()
    seen = SeenPublication(replicas, log.record)
    seen.publish("/dev/shm/weights", 7)
    publication, first, second = log.latest()
    assert replicas.published == [("/dev/shm/weights", 7)] and seen.metrics() == {"rollout/requests": 3.0}
    assert (publication.lane, publication.name, publication.args) == ("publication", "version 7", {"replicas": 2})
    assert [(one.lane, one.name) for one in (first, second)] == [("replica-0", "pause"), ("replica-1", "pause")]
    assert first.args == {"version": 7, "read_s": 0.5}
    assert first.end <= second.start
    slack = 0.5  # the two clocks are read one after the other
    assert publication.start - slack <= first.start and second.end <= publication.end + slack
    assert first.end - first.start >= 0.009


def test_a_publication_that_fails_says_so_itself() -> None:
    log = SpanLog()
    with pytest.raises(RuntimeError, match="no replica is left"):
        SeenPublication(Failing(), log.record).publish("folder", 1)
    assert log.latest() == []
