"""Validation: samples answers to every validation prompt, scores them, and reports metrics and some samples.

A sample whose scoring failed is what it is in training, by reward_model.on_error: the end of the run, a score of 0, or (mask) no
sample at all.  validation_metrics.py says what is reported.

A schedule runs it while training waits (`BlockingValidation`), or in a thread on a pinned version of the policy while training
goes on (`ConcurrentValidation`); the metrics are then logged with the step they belong to, whose line waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlhub.config.sections.reward import RewardModelConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.rewards import RewardManager, RewardOutcome
from rlhub.rewards.base import OUTCOMES, ScoredRows, check_failures, start_scoring
from rlhub.rewards.rows import ROW_TOKENS, response_texts, rows_here
from rlhub.tracking.spans import RecordSpan, ignore_span
from rlhub.tracking.tracker import GenerationRow
from rlhub.trainer.ppo.episodes import EpisodeSamples
from rlhub.trainer.ppo.sync_source import validation_sampling
from rlhub.trainer.ppo.validation_metrics import ScoredSamples, correctness, joined, validation_metrics
from rlhub.utils.timing import PhaseTimer


@dataclass(slots=True, kw_only=True)
class ValidationReport:
    """Holds the result of one validation.  metrics: val/..., val-core/... and val-aux/...; samples: the first completions, to be
    read by people."""

    metrics: dict[str, float]
    samples: list[GenerationRow] = field(default_factory=list)


class ValidationSamples(Protocol):
    """Generates for validation."""

    config: RolloutConfig

    def validation(self, prompts: DataProto) -> Batch:
        """Returns samples of each prompt as `validation_sampling` says, neighbours in prompt order, with the current policy.

        Where a workflow's own rewards are a column `scores`, or a sample could not be scored within its episode, the object
        column `reward_outcome` says which samples failed."""
        ...


class Validator:
    """Runs the whole validation set through generation and reward."""

    def __init__(
        self,
        batches: Iterable[DataProto],
        generator: ValidationSamples,
        reward: RewardManager,
        tokenizer: Any,
        timers: PhaseTimer,
        num_shown: int,
        failures: RewardModelConfig,
    ) -> None:
        """failures: the policy for samples that fail within their episode; that of `reward` is its own."""
        self.batches, self.generator, self.reward = batches, generator, reward
        self.tokenizer, self.timers, self.num_shown = tokenizer, timers, num_shown
        self.failures = failures

    def __call__(self) -> ValidationReport:
        """Evaluates the current policy.  Of responses by reference only those that are shown come to this process."""
        scored: list[ScoredSamples] = []
        sources: list[str] = []
        counts: list[int] = []
        shown: list[GenerationRow] = []
        for prompts in self.batches:
            batch, n = self.generator.validation(prompts), validation_sampling(prompts, self.generator.config).n
            scored.append(self._scored(batch))
            sources.extend(batch.non_tensor_batch["data_source"][::n].tolist())
            counts.extend([n] * (len(sources) - len(counts)))
            if len(shown) < self.num_shown:
                shown.extend(self._shown(batch, scored[-1], self.num_shown - len(shown)))
            if isinstance(batch, BatchRef):
                batch.drop()
        return ValidationReport(metrics=validation_metrics(joined(scored), sources, counts), samples=shown)

    def _scored(self, batch: Batch) -> ScoredSamples:
        """Scores a batch by the reward, or by the workflows' own rewards where they set some."""
        lengths = batch.batch["response_length"].numpy()
        if "scores" not in batch.batch.keys():
            with self.timers.measure("reward"):
                result = start_scoring(self.reward, batch)()
            scores = result.scores.numpy()
            return ScoredSamples(
                scores=scores,
                correct=correctness(result.extra, scores),
                valid=result.valid.numpy(),
                lengths=lengths,
                details=result.extra,
                failures=result.metrics,
            )
        scores, policy = batch.batch["scores"].numpy(), self.failures
        outcomes = [outcome or RewardOutcome() for outcome in batch.non_tensor_batch.get(OUTCOMES, [None] * len(scores))]
        rows = ScoredRows.of(batch, outcomes)
        failures = check_failures(rows, on_error=policy.on_error, max_error_rate=policy.max_error_rate)
        valid = np.array([policy.on_error == "zero" or outcome.error is None for outcome in outcomes], dtype=bool)
        return ScoredSamples(scores=scores, correct=correctness({}, scores), valid=valid, lengths=lengths, failures=failures)

    def _shown(self, batch: Batch, scored: ScoredSamples, limit: int) -> list[GenerationRow]:
        rows = range(min(limit, len(batch)))
        finished = batch.batch["finish_reason"].tolist()
        texts = response_texts(rows_here(batch.select_idxs(list(rows)).select(list(ROW_TOKENS), [], [])), self.tokenizer)
        return [
            GenerationRow(
                prompt=str(batch.non_tensor_batch["raw_prompt"][row]),
                response=texts[row],
                score=float(scored.scores[row]) if scored.valid[row] else None,
                ground_truth=str(batch.non_tensor_batch["ground_truth"][row]),
                data_source=str(batch.non_tensor_batch["data_source"][row]),
                finish_reason="stop" if finished[row] == 0 else "length",
            )
            for row in rows
        ]


class ValidationSchedule(Protocol):
    """Starts validations."""

    def begin(self, version: int) -> Future[ValidationReport]:
        """Validates this version, the newest that was published."""
        ...


class BlockingValidation:
    """Validates while training waits."""

    def __init__(self, validator: Callable[[], ValidationReport]) -> None:
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
