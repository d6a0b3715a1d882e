"""Masked reductions, and the bound of log-ratios.  Values outside the mask are ignored even when they are NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor

MEAN_EPS = 1e-8  # keeps an empty mask finite; reference implementations of PPO use the same
VARIANCE_EPS = 1e-8
LOG_RATIO_BOUND = 20.0  # exp(20) is finite in float32 and far outside any clip range or threshold


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """values where mask is non-zero, else exactly 0 (no gradient flows there).  Shapes broadcast."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum(x m) over `dim`, or over everything."""
    inside = masked(values, mask)
    return inside.sum() if dim is None else inside.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum(x m) / (sum m + 1e-8) over `dim`, or over everything; 0 for an empty mask."""
    count = mask.to(values.dtype).sum() if dim is None else mask.to(values.dtype).sum(dim)
    return masked_sum(values, mask, dim) / (count + MEAN_EPS)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) over the mask, 0 outside it; the variance is unbiased, 0 for fewer than two values.

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
