"""Masked reductions.  Values outside the mask are ignored even when they are NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor

MEAN_EPS = 1e-8  # keeps an empty mask finite; reference implementations of PPO use the same
VARIANCE_EPS = 1e-8
CACHED = 1 << 17  # numbers of which a float64 copy stays in the cache


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


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """`masked` without a gradient, for a mask of zeros and ones: a product where that is as good, since it costs half."""
    values = values.detach()
    if mask.dtype == torch.bool:
        return masked(values, mask)
    product = mask * values if mask.dtype == values.dtype else mask.to(values.dtype).mul_(values)
    return product if bool(product.sum().isfinite()) else masked(values, mask)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance over the mask, sum((x - mean)^2 m) / (M - 1); 0 when at most one value is in the mask."""
    wide = masked(values, mask).double()
    count = mask.double().sum()
    mean = masked_sum(wide, mask) / count.clamp(min=1)
    return (masked_sum((wide - mean).square(), mask) / (count - 1).clamp(min=1)).to(values.dtype)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) over the mask, 0 outside it; no gradient.

    The sums are float64, and the mean is subtracted in two parts, rounded and rest: where all values are equal, float32's
    rounding of their mean times 1e4 would be a large advantage.
    """
    count = mask.sum(dtype=torch.float64)
    inside = kept(values, mask)
    mean = _wide_sum(inside) / count.clamp(min=1)
    rounded = mean.to(values.dtype)
    centred = kept(inside.sub_(rounded).sub_((mean - rounded).to(values.dtype)), mask)
    variance = _wide_sum(centred, squared=True) / (count - 1).clamp(min=1)
    return centred.mul_(torch.rsqrt(variance + VARIANCE_EPS).to(values.dtype))


def _wide_sum(values: Tensor, *, squared: bool = False) -> Tensor:
    """Sum of values (or of their squares) in float64, a cache-sized part at a time."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for part in torch.split(values.reshape(-1), CACHED):
        wide = part.double()
        total += wide.dot(wide) if squared else wide.sum()
    return total
