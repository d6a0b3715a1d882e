"""Values and sums over the tokens that count, and the aggregation of token losses to one number a step.

Values outside the mask are ignored even when they are NaN or infinite.  The denominators of an aggregation are GLOBAL counts of
the step, so each micro-batch of each rank contributes its share, and the gradient does not depend on how the mini-batch is cut
(over micro-batches, ranks, padding or packing).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) is finite in float32 and far outside any clip range or threshold


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Returns values where mask is non-zero, else exactly 0 (no gradient flows there).  Shapes broadcast."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Returns sum(x m) over `dim`, or over everything."""
    inside = masked(values, mask)
    return inside.sum() if dim is None else inside.sum(dim)


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
