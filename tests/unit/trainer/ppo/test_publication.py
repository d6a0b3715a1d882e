"""Publication of weights beside training, and the spans that it and the pauses of replicas become on the driver's clock."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rlhub.rollout_service.server import UpdateReport
from rlhub.sharding_manager.route import SyncReport
from rlhub.tracking.spans import SpanLog
from rlhub.trainer.ppo import publication as publication_module
from rlhub.trainer.ppo.publication import Publisher
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.timing import PhaseTimer


class Service:
    """A publication that lasts until it is let go."""

    def __init__(self) -> None:
        self.go, self.published = threading.Event(), list[int]()
        self.error: Exception | None = None

    async def update(self, folder: str, version: int) -> list[tuple[str, UpdateReport]]:
        assert await asyncio.to_thread(self.go.wait, 60)
        if self.error is not None:
            raise self.error
        self.published.append(version)
        return []

    def metrics(self) -> dict[str, float]:
        return {"rollout/pause_s": 0.5}


class Publishing:
    """A publisher with all that it was given and told."""

    def __init__(self, replicas: Any = None) -> None:
        self.service, self.written, self.announced, self.failed = Service(), list[int](), list[int](), list[BaseException]()
        self.thread, self.spans = LoopThread("service"), SpanLog()
        self.publisher = Publisher(
            replicas or self.service,
            self.thread.loop,
            "folder",
            write=self.write,
            fail=self.failed.append,
            timers=PhaseTimer(),
            record=self.spans.record,
        )

    def write(self, folder: str, version: int) -> list[SyncReport]:
        """As two ranks that have half of the model each, and find that a quarter of it has changed."""
        self.written.append(version)
        report = SyncReport(bytes=200, num_weights=1, version=version, fingerprint="", wire_bytes=50)
        return [report, report]

    def close(self) -> None:
        self.publisher.close()
        self.thread.stop()


def test_training_goes_on_when_its_weights_are_written() -> None:
    parts = Publishing()
    parts.publisher.publish(1, parts.announced.append)
    assert parts.written == [1] and parts.announced == []
    parts.service.go.set()
    parts.publisher.publish(2, parts.announced.append)  # waits for the one before, whose files may go now
    parts.publisher.publish(3, lambda version: parts.announced.append(version * parts.thread.is_current))
    parts.publisher.wait()
    parts.close()
    assert parts.announced == parts.service.published == [1, 2, 3] and parts.publisher.metrics["rollout/pause_s"] == 0.5


def test_a_publication_that_fails_reaches_whoever_waits_for_samples_and_leaves_no_span() -> None:
    parts = Publishing()
    parts.service.error = OSError("no space")
    parts.service.go.set()
    parts.publisher.publish(1, parts.announced.append)
    with pytest.raises(OSError, match="no space"):
        parts.publisher.wait()
    parts.close()
    assert parts.announced == [] and isinstance(parts.failed[0], OSError) and parts.spans.latest() == []


class Clock:
    """Two clocks at the same pace, which stands still unless told."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e9


CLOCK = Clock()


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


def test_every_pause_lies_in_its_publication_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_module, "time", CLOCK)
    replicas = Replicas()
    parts = Publishing(replicas)
    parts.publisher.publish(7, parts.announced.append)
    parts.publisher.wait()
    parts.close()
    publication, first, second = parts.spans.latest()
    assert replicas.published == [("folder", 7)]
    written = {"rollout/published_bytes": 100.0, "rollout/published_share": 0.25}
    fallbacks = {"rollout/full_fallbacks": 0.0}
    assert parts.publisher.metrics == {"rollout/publish_s": 20.0, "rollout/requests": 3.0} | written | fallbacks
    assert (publication.lane, publication.name, publication.args) == ("publication", "version 7", {"replicas": 2})
    assert [(one.lane, one.name) for one in (first, second)] == [("replica-0", "pause"), ("replica-1", "pause")]
    assert first.args == {"version": 7, "read_s": 0.5}
    found = [end for one in (publication, first, second) for end in (one.start, one.end)]
    assert found == pytest.approx([100.0, 120.0, 100.0, 110.0, 110.0, 120.0])
