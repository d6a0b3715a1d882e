"""Validation: sample, score, and report pass@1 and pass@k, over all rows and per data source.

A sample whose scoring failed is what it is in training, by reward_model.on_error: the end of the run, a score of 0, or (mask) no
sample at all.  Masked ones count in no metric but val/reward/num_failed, and a prompt with fewer than k valid samples is left
out of pass@k, of which it says nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlhub.config.sections.reward import RewardModelConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.protocol import DataProto
from rlhub.rewards import RewardManager, RewardOutcome
from rlhub.rewards.failures import FAILED, FAILED_SHARE, check_failures
from rlhub.rewards.naive import OUTCOMES, response_lengths, reward_requests
from rlhub.tracking.tracker import GenerationRow
from rlhub.utils.timing import PhaseTimer

CORRECT_ABOVE = 0.5  # of the score, where the scorer returns no "acc" of its own


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374)."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def powers_up_to(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    return sorted({1 << i for i in range(limit.bit_length()) if 1 << i <= limit} | {limit})


def pass_metrics(prefix: str, correct: np.ndarray, valid: np.ndarray | None = None) -> dict[str, float]:
    """prefix/pass@k for k = 1, 2, 4, ... n, each over the prompts that have k valid samples; none where no prompt has.

    correct, valid: (prompts, n) bool; valid None: all are.
    """
    valid = np.ones_like(correct) if valid is None else valid
    counts = list(zip(valid.sum(1).tolist(), (correct & valid).sum(1).tolist(), strict=True))
    found = {k: [pass_at_k(n, c, k) for n, c in counts if n >= k] for k in powers_up_to(correct.shape[1])}
    return {f"{prefix}/pass@{k}": float(np.mean(chances)) for k, chances in found.items() if chances}


@dataclass(slots=True, kw_only=True)
class ValidationReport:
    """metrics: val/...; samples: the first completions, to be read by people."""

    metrics: dict[str, float]
    samples: list[GenerationRow] = field(default_factory=list)


def correctness(result_extra: dict[str, np.ndarray], scores: np.ndarray) -> np.ndarray:
    """(rows,) bool: the scorer's own "acc" where it gives one, else score > 0.5."""
    acc = result_extra.get("acc")
    values = scores if acc is None else np.array([float(s if a is None else a) for a, s in zip(acc, scores, strict=True)])
    return values > CORRECT_ABOVE


@dataclass(slots=True, kw_only=True)
class ScoredSamples:
    """Samples of some prompts, n of each side by side, all (rows,).  failures: reward/num_failed... of them."""

    scores: np.ndarray
    correct: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray
    failures: dict[str, float]


class ValidationSamples(Protocol):
    """What generates for validation."""

    config: RolloutConfig

    def validation(self, prompts: DataProto) -> DataProto:
        """val_kwargs' samples per prompt, neighbours in prompt order, with the current policy.

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
        """Evaluate the current policy."""
        n = self.generator.config.val_kwargs.n
        scored: list[ScoredSamples] = []
        sources: list[str] = []
        shown: list[GenerationRow] = []
        for prompts in self.batches:
            batch = self.generator.validation(prompts)
            scored.append(self._scored(batch))
            sources.extend(batch.non_tensor_batch["data_source"][::n].tolist())
            if len(shown) < self.num_shown:
                shown.extend(self._shown(batch, scored[-1], self.num_shown - len(shown)))
        scores, correct, valid, lengths = (
            np.concatenate([getattr(part, name) for part in scored]) for name in ("scores", "correct", "valid", "lengths")
        )
        metrics = validation_metrics(correct.reshape(-1, n), scores, lengths, sources, valid.reshape(-1, n))
        return ValidationReport(metrics=metrics | failure_metrics(scored), samples=shown)

    def _scored(self, batch: DataProto) -> ScoredSamples:
        """By the reward, or by the workflows' own rewards where they set some."""
        lengths = batch.batch["response_length"].numpy()
        if "scores" not in batch.batch.keys():
            with self.timers.measure("reward"):
                result = self.reward(batch)
            scores, correct = result.scores.numpy(), correctness(result.extra, result.scores.numpy())
            return ScoredSamples(
                scores=scores, correct=correct, valid=result.valid.numpy(), lengths=lengths, failures=result.metrics
            )
        scores, policy = batch.batch["scores"].numpy(), self.failures
        outcomes = [outcome or RewardOutcome() for outcome in batch.non_tensor_batch.get(OUTCOMES, [None] * len(scores))]
        failures = check_failures(
            lambda row: reward_requests(batch, response_lengths(batch), self.tokenizer, [row])[0],
            outcomes,
            on_error=policy.on_error,
            max_error_rate=policy.max_error_rate,
        )
        valid = np.array([policy.on_error == "zero" or outcome.error is None for outcome in outcomes], dtype=bool)
        return ScoredSamples(scores=scores, correct=correctness({}, scores), valid=valid, lengths=lengths, failures=failures)

    def _shown(self, batch: DataProto, scored: ScoredSamples, limit: int) -> list[GenerationRow]:
        rows = range(min(limit, len(batch)))
        lengths = batch.batch["response_length"].tolist()
        responses = [batch.batch["responses"][row, : lengths[row]].tolist() for row in rows]
        finished = batch.batch["finish_reason"].tolist()
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
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


def validation_metrics(
    correct: np.ndarray, scores: np.ndarray, lengths: np.ndarray, sources: list[str], valid: np.ndarray | None = None
) -> dict[str, float]:
    """val/pass@k, val/reward/mean, val/response_length/mean, and pass@k per data source where there are several.

    correct: (prompts, n) bool; scores and lengths: (prompts * n,); sources: one per prompt; valid: (prompts, n) bool, None: all.
    What needs a valid sample and has none is left out.
    """
    valid = np.ones_like(correct) if valid is None else valid
    counted = scores[valid.ravel()].astype(np.float64)
    metrics = {
        **pass_metrics("val", correct, valid),
        **({"val/reward/mean": float(counted.mean())} if len(counted) else {}),
        "val/response_length/mean": float(lengths.mean()),
        "val/num_prompts": float(len(correct)),
    }
    for source in sorted(set(sources)):
        rows = np.array([s == source for s in sources])
        metrics |= pass_metrics(f"val/{source}", correct[rows], valid[rows])
    return metrics


def failure_metrics(scored: Sequence[ScoredSamples]) -> dict[str, float]:
    """val/reward/num_failed, the same of each kind of failure, and val/reward/failed_share, over all samples."""
    counts: Counter[str] = Counter()
    for part in scored:
        counts.update({name: count for name, count in part.failures.items() if name.startswith(FAILED)})
    num_rows = sum(len(part.scores) for part in scored)
    shares = {f"val/{FAILED_SHARE}": counts[FAILED] / max(num_rows, 1)}
    return {f"val/{name}": float(count) for name, count in sorted(counts.items())} | shares
