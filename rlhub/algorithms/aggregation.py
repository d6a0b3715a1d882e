"""From per-token losses to the scalar of one optimizer step.

The denominators are GLOBAL counts of the step, so each micro-batch of each rank contributes its share and the gradient does
not depend on how the mini-batch is cut (over micro-batches, ranks, padding or packing).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhub.algorithms.masked import masked_sum


@dataclass(slots=True, kw_only=True)
class Denominators:
    """tokens: sum of response_mask over the step.  sequences: rows with at least one token.  scale: tokens per sequence that
    seq-mean-token-sum-norm divides by (the longest response allowed, never the padded width)."""

    tokens: float
    sequences: float
    scale: float = 1.0


def aggregate(loss: Tensor, mask: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """This micro-batch's share of the step's loss (scalar).

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
