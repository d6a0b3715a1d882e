"""The rollout correction as it is configured: from log-ratios to token weights and kept tokens.

Used twice: on the driver over a whole batch before the update, and, where the old log-probs have no pass of their own, in the
update on the whole rows of a micro-batch (then without what needs the whole batch, which the configuration's checks refuse).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.correction.rejection import kept, m2po_kept
from rlhub.algorithms.correction.weights import RATIOS, bounded, mean_weight, normalized, outside
from rlhub.algorithms.masked import masked_sum
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig, rejection_bounds, weight_bounds


@dataclass(slots=True, kw_only=True)
class Correction:
    """weights: (rows, response) float64, 0 outside the mask, or None without `rollout_is`.  keep: (rows, response) bool, the
    model tokens that no rule rejected.  sums: token sums by metric name; divided by the number of model tokens they are
    means and shares, and they add up over micro-batches and ranks.  scale: what batch normalisation divided by, or None."""

    weights: Tensor | None
    keep: Tensor
    sums: dict[str, Tensor]
    scale: Tensor | None = None


def correct(config: RolloutCorrectionConfig, log_ratio: Tensor, mask: Tensor, advantages: Tensor | None = None) -> Correction:
    """Weights and rejection from l = log pi_old - log mu, all (rows, response).  advantages: read where M2PO is on.

    Weights and rules see every model token, whether or not another rule rejects it (a sequence's ratio is that of all of
    its tokens); M2PO sees what the rules have left.
    """
    rejected, sums = ~mask.bool(), {}
    for rule, bounds in rejection_bounds(config.rollout_rs, config.rollout_rs_threshold).items():
        passed = kept(log_ratio, mask, rule, bounds)
        rejected = rejected | ~passed
        sums[f"correction/rejected/{rule}"] = masked_sum((~passed).double(), mask)
    keep = ~rejected
    if config.m2po_threshold is not None:
        assert advantages is not None
        before, keep = keep, m2po_kept(log_ratio, advantages, keep, config.m2po_threshold)
        sums["correction/rejected/m2po"] = (before & ~keep).double().sum()
    weights = scale = None
    used = keep
    if config.rollout_is is not None:
        bounds = weight_bounds(config.rollout_is_threshold)
        ratios = RATIOS[config.rollout_is](log_ratio, mask)
        weights = bounded(ratios, mask, bounds)
        if config.rollout_is_batch_normalize:
            scale = mean_weight(weights, mask, config.rollout_is)
            weights = normalized(weights, mask, config.rollout_is)
        sums["correction/outside_share"] = outside(ratios, mask, bounds).double().sum()
        sums["correction/weight_mean"] = weights.sum()
        used = keep & (weights > 0)
    sums["mismatch/masked_share"] = masked_sum((~used).double(), mask)
    return Correction(weights=weights, keep=keep, sums=sums, scale=scale)


def token_factors(correction: Correction) -> Tensor:
    """One factor for each token's loss, (rows, response) float64: its weight (1 without weights), 0 where it was rejected."""
    keep = correction.keep.double()
    return keep if correction.weights is None else torch.where(correction.keep, correction.weights, keep)
