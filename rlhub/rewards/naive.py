"""The plain manager: the reward of a response is its score, on its last token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhub.protocol import DataProto
from rlhub.rewards.base import Decoder, ManagerParts, RewardResult
from rlhub.rewards.failures import check_failures, max_failures
from rlhub.rewards.pool import RewardOutcome, RewardRequest

NUMBERS = (bool, int, float)
OUTCOMES = "reward_outcome"
"""Object column of rows that were scored ahead, each by itself: their RewardOutcome, or None."""


class NaiveManager:
    """Decodes, scores in the pool, applies the failure policy.  Subclasses change scores in `adjust`."""

    def __init__(self, parts: ManagerParts, knobs: Any = None) -> None:
        self.parts, self.knobs = parts, knobs

    def __call__(self, batch: DataProto) -> RewardResult:
        parts = self.parts
        lengths = response_lengths(batch)
        outcomes = self._outcomes(batch, lengths)

        def request(row: int) -> RewardRequest:
            return reward_requests(batch, lengths, parts.tokenizer, [row])[0]

        metrics = check_failures(request, outcomes, on_error=parts.on_error, max_error_rate=parts.max_error_rate)
        scored = np.array([outcome.error is None for outcome in outcomes], dtype=bool)
        raw = np.array([outcome.score for outcome in outcomes], dtype=np.float32)
        adjusted, added = self.adjust(raw, lengths.numpy())
        scores = torch.from_numpy(np.where(scored, adjusted, 0).astype(np.float32))
        extra = added | collect_details(outcomes)
        return RewardResult(
            token_level_scores=on_last_token(scores, lengths, _tensor(batch, "responses").shape[1]),
            scores=scores,
            valid=torch.from_numpy(scored) if parts.on_error == "mask" else torch.ones(len(outcomes), dtype=torch.bool),
            extra=extra,
            metrics=metrics | numeric_means(extra),
        )

    def _outcomes(self, batch: DataProto, lengths: Tensor) -> list[RewardOutcome]:
        """Of every row; only those that were not scored ahead are decoded and go to the pool."""
        parts = self.parts
        ahead = batch.non_tensor_batch.get(OUTCOMES)
        known = [None] * len(lengths) if ahead is None else list(ahead)
        missing = [row for row, outcome in enumerate(known) if outcome is None]
        if missing:
            requests = reward_requests(batch, lengths, parts.tokenizer, missing)
            allowed = max_failures(len(known), on_error=parts.on_error, max_error_rate=parts.max_error_rate)
            for row, outcome in zip(missing, parts.pool.score(requests, max_failures=allowed), strict=True):
                known[row] = outcome
        return known

    def lenient(self) -> NaiveManager:
        """The same scores, from a manager that lets every failure pass as a sample without a valid score."""
        return type(self)(dataclasses.replace(self.parts, on_error="mask", max_error_rate=1.0), self.knobs)

    def adjust(self, scores: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """scores (B,) float32 and response lengths (B,) in tokens -> rewards (B,) and further entries of `extra`."""
        return scores, {}

    def close(self) -> None:
        self.parts.pool.close()


def response_lengths(batch: DataProto) -> Tensor:
    """(B,) int64 tokens of each response, those included that an environment wrote: attention_mask's part over the response."""
    width = _tensor(batch, "responses").shape[1]
    mask = _tensor(batch, "attention_mask")
    return mask[:, mask.shape[1] - width :].sum(1)


def _tensor(batch: DataProto, name: str) -> Tensor:
    assert batch.batch is not None
    column: Tensor = batch.batch[name]
    return column


def reward_requests(
    batch: DataProto, lengths: Tensor, tokenizer: Decoder, rows: Sequence[int] | None = None
) -> list[RewardRequest]:
    """One request a row (of `rows`, None: of all), with the response's text less special tokens."""
    responses, columns = _tensor(batch, "responses"), batch.non_tensor_batch
    chosen = range(len(lengths)) if rows is None else rows
    texts = tokenizer.batch_decode([responses[row, : int(lengths[row])].tolist() for row in chosen], skip_special_tokens=True)
    return [
        RewardRequest(
            data_source=columns["data_source"][row],
            solution_str=text,
            ground_truth=columns["ground_truth"][row],
            extra_info=columns["extra_info"][row],
        )
        for row, text in zip(chosen, texts, strict=True)
    ]


def on_last_token(scores: Tensor, lengths: Tensor, width: int) -> Tensor:
    """(B, width) float32: scores (B,) at index length - 1, 0 elsewhere and in rows of length 0."""
    placed = torch.zeros(len(scores), width, dtype=torch.float32)
    rows = torch.nonzero(lengths > 0).squeeze(1)
    placed[rows, lengths[rows] - 1] = scores[rows]
    return placed


def collect_details(outcomes: Sequence[RewardOutcome]) -> dict[str, np.ndarray]:
    """The rows' details as columns (B,): float64 if every row has a number, else objects, None where a row has no entry."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.details)
    return {name: _column([outcome.details.get(name) for outcome in outcomes]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    if all(isinstance(value, NUMBERS) for value in values):
        return np.array(values, dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def numeric_means(extra: dict[str, np.ndarray]) -> dict[str, float]:
    """reward/<name>: mean over the rows that have a finite number."""
    means = {}
    for name, column in extra.items():
        numbers = [float(value) for value in column if isinstance(value, NUMBERS) and np.isfinite(value)]
        if numbers and all(value is None or isinstance(value, NUMBERS) for value in column):
            means[f"reward/{name}"] = float(np.mean(numbers))
    return means
