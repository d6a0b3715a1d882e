"""Blocking and concurrent validation, with a validator that waits until the test lets it go."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rlhub.tracking.spans import SpanLog
from rlhub.trainer.ppo.validation import BlockingValidation, ConcurrentValidation, ValidationReport

WAIT_S = 60.0


class Waiting:
    """A validator and its samples: `log` has what happened in order."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.log: list[Any] = []
        self.go, self.error = threading.Semaphore(0), error

    def __call__(self) -> ValidationReport:
        assert self.go.acquire(timeout=WAIT_S)
        self.log.append("validated")
        if self.error is not None:
            raise self.error
        return ValidationReport(metrics={"val/pass@1": 0.5})

    def pin(self, version: int) -> None:
        self.log.append(("pin", version))

    def release(self) -> None:
        self.log.append("release")

    def weights(self) -> None:
        self.log.append("weights")


def concurrent(parts: Waiting, spans: SpanLog) -> ConcurrentValidation:
    return ConcurrentValidation(parts, parts, parts.weights, spans.record)  # type: ignore[arg-type]


def test_blocking_validation_is_done_when_it_returns() -> None:
    parts = Waiting()
    parts.go.release()
    done = BlockingValidation(parts).begin(3)  # type: ignore[arg-type]
    assert done.done() and done.result().metrics == {"val/pass@1": 0.5} and parts.log == ["validated"]


def test_training_goes_on_when_a_replica_has_the_version() -> None:
    parts, spans = Waiting(), SpanLog()
    schedule = concurrent(parts, spans)
    running = schedule.begin(3)
    assert not running.done() and parts.log == ["weights", ("pin", 3)]
    parts.go.release()
    assert running.result(WAIT_S).metrics == {"val/pass@1": 0.5}
    schedule.close()
    assert parts.log[2:] == ["validated", "release"]
    assert [(span.lane, span.name) for span in spans.latest()] == [("validation", "version 3")]


def test_the_next_validation_waits_for_the_one_before() -> None:
    parts = Waiting()
    schedule = concurrent(parts, SpanLog())
    schedule.begin(1)
    with ThreadPoolExecutor(1) as caller:
        second: Future[Future[ValidationReport]] = caller.submit(schedule.begin, 2)
        assert ("pin", 2) not in parts.log
        parts.go.release(2)
        assert second.result(WAIT_S).result(WAIT_S).metrics == {"val/pass@1": 0.5}
    schedule.close()
    assert parts.log == ["weights", ("pin", 1), "validated", "release", "weights", ("pin", 2), "validated", "release"]


def test_a_validation_that_fails_gives_its_replica_back_and_raises_where_it_is_read() -> None:
    parts, spans = Waiting(error=ValueError("no reward")), SpanLog()
    schedule = concurrent(parts, spans)
    running = schedule.begin(1)
    parts.go.release(2)
    for one in (running, schedule.begin(2)):  # the next begins: an error is for whoever reads its validation
        with pytest.raises(ValueError, match="no reward"):
            one.result(WAIT_S)
    schedule.close()
    assert parts.log.count("release") == 2 and len(spans.latest()) == 2
