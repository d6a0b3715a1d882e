"""When validation runs: while training waits, or concurrently with it on a pinned version of the policy.

Concurrent validation runs in a thread; its metrics are logged with the step they belong to, whose line waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from rlhub.tracking.spans import RecordSpan, ignore_span
from rlhub.trainer.ppo.episodes import EpisodeSamples
from rlhub.trainer.ppo.validation import ValidationReport, Validator


class ValidationSchedule(Protocol):
    """Starts validations."""

    def begin(self, version: int) -> Future[ValidationReport]:
        """Validates this version, the newest that was published."""
        ...


class BlockingValidation:
    """Validates while training waits."""

    def __init__(self, validator: Validator) -> None:
        self.validator = validator

    def begin(self, version: int) -> Future[ValidationReport]:
        """Returns when the validation is done."""
        done: Future[ValidationReport] = Future()
        done.set_result(self.validator())
        return done


class ConcurrentValidation:
    """Validates while training goes on, one validation at a time: the next waits for the one before.

    wait_for_weights: returns when the newest version is on the replicas.  record: receives each validation's span.
    """

    def __init__(
        self,
        validator: Validator,
        samples: EpisodeSamples,
        wait_for_weights: Callable[[], None],
        record: RecordSpan = ignore_span,
    ) -> None:
        self.validator, self.samples, self.wait_for_weights, self.record = validator, samples, wait_for_weights, record
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="validation")
        self._running: Future[ValidationReport] | None = None

    def begin(self, version: int) -> Future[ValidationReport]:
        """Returns as soon as a replica is pinned to the version."""
        if self._running is not None:
            self._running.exception()  # waits; whoever logs it raises
        self.wait_for_weights()
        self.samples.pin(version)
        self._running = self._thread.submit(self._run, version)
        return self._running

    def _run(self, version: int) -> ValidationReport:
        started = time.perf_counter()
        try:
            return self.validator()
        finally:
            self.samples.release()
            self.record("validation", f"version {version}", started, time.perf_counter())

    def close(self) -> None:
        """Waits for the validation that runs: its replica is about to end."""
        self._thread.shutdown(wait=True, cancel_futures=True)
