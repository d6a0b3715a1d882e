"""Validation: sample, score, and report pass@1 and pass@k, over all rows and per data source."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlhub.config.rollout import RolloutConfig
from rlhub.protocol import DataProto
from rlhub.rewards import RewardManager
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


def pass_metrics(prefix: str, correct: np.ndarray) -> dict[str, float]:
    """prefix/pass@k for k = 1, 2, 4, ... n.  correct: (prompts, n) bool."""
    n = correct.shape[1]
    counts = correct.sum(1)
    return {f"{prefix}/pass@{k}": float(np.mean([pass_at_k(n, int(c), k) for c in counts])) for k in powers_up_to(n)}


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


class ValidationSamples(Protocol):
    """What generates for validation."""

    config: RolloutConfig

    def validation(self, prompts: DataProto) -> DataProto:
        """val_kwargs' samples per prompt, neighbours in prompt order, with the current policy."""
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
    ) -> None:
        self.batches, self.generator, self.reward = batches, generator, reward
        self.tokenizer, self.timers, self.num_shown = tokenizer, timers, num_shown

    def __call__(self) -> ValidationReport:
        """Evaluate the current policy."""
        n = self.generator.config.val_kwargs.n
        correct, scores, lengths, sources, samples = [], [], [], [], []
        for prompts in self.batches:
            batch = self.generator.validation(prompts)
            row_scores, right = self._scored(batch)
            correct.append(right.reshape(-1, n))
            scores.append(row_scores)
            lengths.append(batch.batch["response_length"].numpy())
            sources.extend(batch.non_tensor_batch["data_source"][::n].tolist())
            if len(samples) < self.num_shown:
                samples.extend(self._shown(batch, row_scores, self.num_shown - len(samples)))
        return ValidationReport(
            metrics=validation_metrics(np.concatenate(correct), np.concatenate(scores), np.concatenate(lengths), sources),
            samples=samples,
        )

    def _scored(self, batch: DataProto) -> tuple[np.ndarray, np.ndarray]:
        """Scores (rows,) and which are right: by the reward, or by the workflows' own rewards where they set some."""
        if "scores" in batch.batch.keys():
            scores = batch.batch["scores"].numpy()
            return scores, correctness({}, scores)
        with self.timers.measure("reward"):
            result = self.reward(batch)
        return result.scores.numpy(), correctness(result.extra, result.scores.numpy())

    def _shown(self, batch: DataProto, scores: np.ndarray, limit: int) -> list[GenerationRow]:
        rows = range(min(limit, len(batch)))
        lengths = batch.batch["response_length"].tolist()
        responses = [batch.batch["responses"][row, : lengths[row]].tolist() for row in rows]
        finished = batch.batch["finish_reason"].tolist()
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [
            GenerationRow(
                prompt=str(batch.non_tensor_batch["raw_prompt"][row]),
                response=texts[row],
                score=float(scores[row]),
                ground_truth=str(batch.non_tensor_batch["ground_truth"][row]),
                data_source=str(batch.non_tensor_batch["data_source"][row]),
                finish_reason="stop" if finished[row] == 0 else "length",
            )
            for row in rows
        ]


def validation_metrics(correct: np.ndarray, scores: np.ndarray, lengths: np.ndarray, sources: list[str]) -> dict[str, float]:
    """val/pass@k, val/reward/mean, val/response_length/mean, and pass@k per data source where there are several.

    correct: (prompts, n) bool; scores and lengths: (prompts * n,); sources: one per prompt.
    """
    metrics = {
        **pass_metrics("val", correct),
        "val/reward/mean": float(scores.mean()),
        "val/response_length/mean": float(lengths.mean()),
        "val/num_prompts": float(len(correct)),
    }
    for source in sorted(set(sources)):
        metrics |= pass_metrics(f"val/{source}", correct[np.array([s == source for s in sources])])
    return metrics
