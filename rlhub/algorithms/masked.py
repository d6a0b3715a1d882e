"""Masked reductions.  Values outside the mask are ignored even when they are NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor

MEAN_EPS = 1e-8  # keeps an empty mask finite; reference implementations of PPO use the same
VARIANCE_EPS = 1e-8


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """values where mask is non-zero, else exactly 0 (no gradient flows there).  Shapes broadcast."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum(x m) over `dim`, or over everything."""
    kept = masked(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum(x m) / (sum m + 1e-8) over `dim`, or over everything; 0 for an empty mask."""
    count = mask.to(values.dtype).sum() if dim is None else mask.to(values.dtype).sum(dim)
    return masked_sum(values, mask, dim) / (count + MEAN_EPS)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance over the mask, sum((x - mean)^2 m) / (M - 1); 0 when at most one value is in the mask."""
    return _moments(masked(values, mask).double(), mask)[1].to(values.dtype)


def _moments(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over the mask of float64 values."""
    count = mask.double().sum()
    mean = masked_sum(values, mask) / count.clamp(min=1)
    return mean, masked_sum((values - mean).square(), mask) / (count - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) over the mask, 0 outside it.

    In float64: where all values are equal, float32's rounding of their mean times 1e4 would be a large advantage.
    """
    wide = masked(values, mask).double()
    mean, variance = _moments(wide, mask)
    return masked((wide - mean) * torch.rsqrt(variance + VARIANCE_EPS), mask).to(values.dtype)
