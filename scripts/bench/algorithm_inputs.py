"""Inputs that both sides of algorithm_cost.py draw alike: no import of either."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

COST_SHAPE = (1024, 3072)
NUM_ITEMS, NUM_PARTS = 10_000, 512
EQUAL_ITEMS = 10_240  # verl's equal sizes need a number of items that the number of parts divides
LENGTH_KINDS = ("lognormal", "uniform", "bimodal")
KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "abs+", "mse+", "k3+")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")
SCALE = 77.0
GAMMA, LAM = 0.98, 0.9
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0
SEQUENCE_CLIP_LOW, SEQUENCE_CLIP_HIGH = 0.02, 0.03
DIVERGENCE = 0.03
COMPONENTS = {"correct": 1.0, "format": 0.25}
REJECTION = {
    "token_k1": "0.8_1.25",
    "token_k2": "0.02",
    "token_k3": "0.02",
    "seq_sum_k1": "0.5_2.0",
    "seq_mean_k2": "0.02",
    "seq_max_k3": "0.2",
}
ONE_SIDED = "0.8_3.0"


@dataclass(slots=True, kw_only=True)
class Batch:
    """(rows, response) each unless said otherwise; float64 for agreement, float32 for cost.

    mask: int64, with holes (tool output) where `holes`; scores: outcome on the last model token, zero elsewhere, no two of a
    group alike; rewards: on every token; group: (rows,); noise, other: two more columns of numbers.
    """

    mask: Tensor
    scores: Tensor
    rewards: Tensor
    values: Tensor
    group: Tensor
    old_log_probs: Tensor
    log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    sequence_advantages: Tensor
    weights: Tensor
    sum_pi_squared: Tensor
    per_row: Tensor

    @property
    def uids(self) -> np.ndarray:
        """Groups as verl has them: an array of strings."""
        return np.array([f"prompt-{number}" for number in self.group.tolist()], dtype=object)


def batch(rows: int = 48, width: int = 40, group: int = 6, *, holes: bool = True, seed: int = 0) -> Batch:
    """A batch to agree on."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(3, width + 1, (rows, 1), generator=generator)
    columns = torch.arange(width)
    mask = (columns < lengths).long()
    if holes:
        middle = (columns >= lengths // 3) & (columns < lengths // 2)
        mask = mask * (1 - middle.long())
    per_row = normal(rows)
    scores = torch.zeros(rows, width, dtype=torch.float64)
    last = (mask * columns).argmax(1)
    scores[torch.arange(rows), last] = per_row
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3 - 0.05
    advantages = normal(rows, width)
    return Batch(
        mask=mask,
        scores=scores,
        rewards=normal(rows, width) * mask,
        values=normal(rows, width),
        group=torch.arange(rows) // group,
        old_log_probs=old,
        log_probs=(old + 0.3 * normal(rows, width)).clamp(max=-1e-3),
        rollout_log_probs=(old + 0.3 * normal(rows, width)).clamp(max=-1e-3),
        advantages=advantages,
        sequence_advantages=per_row[:, None].expand(rows, width) * mask,
        weights=torch.rand(rows, width, generator=generator, dtype=torch.float64) * 2,
        sum_pi_squared=torch.rand(rows, width, generator=generator, dtype=torch.float64),
        per_row=per_row,
    )


def cost_batch() -> Batch:
    """1024 x 3072, 8 samples a prompt, in the trainer's dtypes."""
    rows, width = COST_SHAPE
    drawn = batch(rows, width, 8, holes=False)
    for name in Batch.__slots__:
        column = getattr(drawn, name)
        if column.dtype == torch.float64:
            setattr(drawn, name, column.float())
    return drawn


def lengths(kind: str, number: int, seed: int = 0) -> np.ndarray:
    """Response lengths in tokens: a long tail, all alike, or short answers and long thoughts."""
    random = np.random.default_rng(seed)
    if kind == "lognormal":
        return random.lognormal(6.0, 0.8, number).clip(8, 8192).astype(int)
    if kind == "uniform":
        return random.integers(16, 4097, number)
    short = random.random(number) < 0.7
    return np.where(short, random.normal(300, 80, number), random.normal(3500, 400, number)).clip(16, 4096).astype(int)


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Of the second of two calls: whose turn came last decides what the caches hold, and that must not tell the sides apart."""
    call()
    start = time.process_time()
    call()
    return time.process_time() - start
