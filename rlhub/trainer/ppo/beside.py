"""When validation runs: in turns with training, or beside it on a pinned version of the policy.

Beside training it runs in a thread; its metrics are logged with the step they belong to, whose line waits for them.
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
        """Validate this version, the newest that was published."""
        ...


class ValidationInTurn:
    """Training waits."""

    def __init__(self, validator: Validator) -> None:
        self.validator = validator

    def begin(self, version: int) -> Future[ValidationReport]:
        """Returns when it is done."""
        done: Future[ValidationReport] = Future()
        done.set_result(self.validator())
        return done


class ValidationBeside:
    """One validation at a time: the next waits for the one before.  arrived: waits until the version is on the replicas.
    record: told of each validation's stretch."""

    def __init__(
        self, validator: Validator, samples: EpisodeSamples, arrived: Callable[[], None], record: RecordSpan = ignore_span
    ) -> None:
        self.validator, self.samples, self.arrived, self.record = validator, samples, arrived, record
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="validation")
        self._under_way: Future[ValidationReport] | None = None

    def begin(self, version: int) -> Future[ValidationReport]:
        """Returns as soon as a replica is pinned to the version."""
        if self._under_way is not None:
            self._under_way.exception()  # waits; whoever logs it raises
        self.arrived()
        self.samples.pin(version)
        self._under_way = self._thread.submit(self._run, version)
        return self._under_way

    def _run(self, version: int) -> ValidationReport:
        started = time.perf_counter()
        try:
            return self.validator()
        finally:
            self.samples.release()
            self.record("validation", f"version {version}", started, time.perf_counter())

    def close(self) -> None:
        """Wait for what runs: its replica is about to go."""
        self._thread.shutdown(wait=True, cancel_futures=True)
