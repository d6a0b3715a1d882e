"""Masked reductions: sums, means and whitening over the tokens that count, and the aggregation of token losses to one
number a step.

Values outside the mask are ignored even when they are NaN or infinite.  The denominators of an aggregation are GLOBAL counts of
the step, so each micro-batch of each rank contributes its share, and the gradient does not depend on how the mini-batch is cut
(over micro-batches, ranks, padding or packing).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MEAN_EPS = 1e-8  # keeps an empty mask finite; reference implementations of PPO use the same
VARIANCE_EPS = 1e-8
LOG_RATIO_BOUND = 20.0  # exp(20) is finite in float32 and far outside any clip range or threshold


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Returns values where mask is non-zero, else exactly 0 (no gradient flows there).  Shapes broadcast."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Returns sum(x m) over `dim`, or over everything."""
    inside = masked(values, mask)
    return inside.sum() if dim is None else inside.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Returns sum(x m) / (sum m + 1e-8) over `dim`, or over everything; 0 for an empty mask."""
    count = mask.to(values.dtype).sum() if dim is None else mask.to(values.dtype).sum(dim)
    return masked_sum(values, mask, dim) / (count + MEAN_EPS)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Returns (x - mean) * rsqrt(var + 1e-8) over the mask, 0 outside it; the variance is unbiased, 0 for fewer than two values.

    The sums are float64, and the mean is subtracted in two parts, rounded and rest: where all values are equal, float32's
    rounding of their mean times 1e4 would be a large advantage.  No gradient flows.
    """
    count = mask.sum(dtype=torch.float64)
    inside = masked(values.detach(), mask)
    mean = inside.sum(dtype=torch.float64) / count.clamp(min=1)
    rounded = mean.to(values.dtype)
    centred = masked(inside - rounded - (mean - rounded).to(values.dtype), mask)
    variance = centred.double().square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + VARIANCE_EPS).to(values.dtype)


@dataclass(slots=True, kw_only=True)
class Denominators:
    """tokens: sum of response_mask over the step.  sequences: rows with at least one token.  scale: tokens per sequence that
    seq-mean-token-sum-norm divides by (the longest response allowed, never the padded width)."""

    tokens: float
    sequences: float
    scale: float = 1.0


def aggregate(loss: Tensor, mask: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """Returns this micro-batch's share of the step's loss (scalar).

    token-mean: sum L m / N_tokens; seq-mean-token-sum: sum_i sum_t L m / B; seq-mean-token-mean: sum_i (sum_t L m / L_i) / B;
    seq-mean-token-sum-norm: seq-mean-token-sum / scale; token-sum: sum L m.  B excludes fully masked rows.
    An empty step gives 0.
    """
    tokens, sequences = max(denominators.tokens, 1.0), max(denominators.sequences, 1.0)
    if mode == "token-mean":
        return masked_sum(loss, mask) / tokens
    if mode == "seq-mean-token-sum":
        return masked_sum(loss, mask) / sequences
    if mode == "seq-mean-token-sum-norm":
        return masked_sum(loss, mask) / (sequences * denominators.scale)
    if mode == "seq-mean-token-mean":
        lengths = mask.to(loss.dtype).sum(1).clamp(min=1)
        return (masked_sum(loss, mask, dim=1) / lengths).sum() / sequences
    if mode == "token-sum":
        return masked_sum(loss, mask)
    raise ValueError(
        f"no loss aggregation {mode!r}; known: token-mean, seq-mean-token-sum, seq-mean-token-mean, "
        "seq-mean-token-sum-norm, token-sum"
    )
