"""The rollout correction as it is configured: from log-ratios to token weights and kept tokens.

`correct` is used twice: over a whole batch before the update, and, where the old log-probs have no pass of their own, in the
update on the whole rows of a micro-batch (then without what needs the whole batch, which the configuration's checks refuse).
Weights are in weights.py; rejection is here: of tokens or sequences whose probabilities differ too much between trainer and
rollout engine (MIS, Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
training-inference mismatch").

A rule says what is measured of each token, and how a row's tokens are put together.  With l = log pi - log mu clamped to +-20:
k1 = -l, held to the band log lower <= -l <= log upper, that is lower <= mu / pi <= upper; k2 = l^2 / 2 and k3 = exp(l) - 1 - l,
held below upper.  `token`: each token by itself; `seq_sum`, `seq_mean`, `seq_max`: the row's sum, mean, largest, for all of it.
Bounds are inclusive.  None of these rules looks at advantages (the off-policy mask of DeepSeek-V3.2 is the upper bound of
seq_mean_k1, on rows of negative advantage alone).

A band bounds mu / pi, as verl 0.9.1 computes it, so that thresholds tuned there mean the same here.  (The paper, and the
documentation of other implementations, speak of pi / mu; for a single number and for bands that are their own reciprocal, both
are the same.)

M2PO (Zheng et al. 2025, "Prosperity before collapse", arXiv 2510.01161) holds the second moment of log(pi / mu) over a batch
under a threshold by dropping as few tokens as possible.  Only tokens that a trust region would hold count: those where advantage
and log-ratio have the same sign, that is where the policy has already moved the way the advantage pushes.  (Some implementations
take the moment over all tokens; then tokens on their way back, which no clip touches, would be dropped too.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.correction.weights import (
    RATIOS,
    bounded,
    log_ratios,
    mean_weight,
    normalized,
    outside,
    proximal_log_probs,
)
from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked
from rlhub.algorithms.mismatch import added
from rlhub.algorithms.statistics import HERE, Gather, row_sums
from rlhub.config.sections.rollout_correction import RATIO_RULES, Bounds, RolloutCorrectionConfig, rejection_bounds, weight_bounds


@dataclass(slots=True, kw_only=True)
class Correction:
    """weights: (rows, response) float64, 0 outside the mask, or None without `rollout_is`.  keep: (rows, response) bool, the
    model tokens that no rule rejected.  sums: token sums by metric name; divided by the number of model tokens they are
    means and shares, and they add up over micro-batches and ranks.  scale: what batch normalisation divided by, or None."""

    weights: Tensor | None
    keep: Tensor
    sums: dict[str, Tensor]
    scale: Tensor | None = None


def correct(
    config: RolloutCorrectionConfig,
    log_ratio: Tensor,
    mask: Tensor,
    advantages: Tensor | None = None,
    gather: Gather = HERE,
) -> Correction:
    """Returns weights and rejection from l = log pi_old - log mu, all (rows, response).  advantages: read where M2PO is on.

    Weights and rules see every model token, whether or not another rule rejects it (a sequence's ratio is that of all of
    its tokens); M2PO sees what the rules have left.  Its bound, batch normalisation and the sums are those of the whole batch.
    """
    rejected, rows = ~mask.bool(), {}
    for rule, bounds in rejection_bounds(config.rollout_rs, config.rollout_rs_threshold).items():
        passed = kept(log_ratio, mask, rule, bounds)
        rejected = rejected | ~passed
        rows[f"correction/rejected/{rule}"] = row_sums(~passed, mask)
    keep = ~rejected
    if config.m2po_threshold is not None:
        assert advantages is not None
        before, keep = keep, m2po_kept(log_ratio, advantages, keep, config.m2po_threshold, gather)
        rows["correction/rejected/m2po"] = row_sums(~keep, before)
    weights = scale = None
    used = keep
    if config.rollout_is is not None:
        bounds = weight_bounds(config.rollout_is_threshold)
        ratios = RATIOS[config.rollout_is](log_ratio, mask)
        weights = bounded(ratios, mask, bounds)
        if config.rollout_is_batch_normalize:
            scale = mean_weight(weights, mask, config.rollout_is, gather)
            weights = normalized(weights, mask, config.rollout_is, gather)
        rows["correction/outside_share"] = row_sums(outside(ratios, mask, bounds), mask)
        rows["correction/weight_mean"] = row_sums(weights, mask)
        used = keep & (weights > 0)
    rows["mismatch/masked_share"] = row_sums(~used, mask)
    return Correction(weights=weights, keep=keep, sums=added(rows, gather), scale=scale)


def token_factors(correction: Correction) -> Tensor:
    """Returns one factor for each token's loss, (rows, response) float64: its weight (1 without weights), 0 where it was
    rejected."""
    keep = correction.keep.double()
    return keep if correction.weights is None else torch.where(correction.keep, correction.weights, keep)


def kept(log_ratio: Tensor, mask: Tensor, rule: str, bounds: Bounds) -> Tensor:
    """Returns the model tokens that pass one rule, (rows, response) bool.  A rule measures all model tokens of its row."""
    measure, combine = RULES[rule]
    clamped = masked(log_ratio, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    values = combine(measure(clamped), mask)
    if rule in RATIO_RULES:
        assert bounds.lower is not None
        passed = (values >= math.log(bounds.lower)) & (values <= math.log(bounds.upper))
    else:
        passed = values <= bounds.upper
    return torch.logical_and(passed, mask.bool())


def _reversed(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def _squared(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _schulman(log_ratio: Tensor) -> Tensor:
    return log_ratio.expm1() - log_ratio


def _each(values: Tensor, mask: Tensor) -> Tensor:
    return masked(values, mask)


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return row_sums(values, mask)[:, None].expand_as(values)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return _sum(values, mask) / mask.sum(1).clamp(min=1)[:, None]


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Is used for k2 and k3, which are never negative."""
    return masked(values, mask).amax(1)[:, None].expand_as(values)


RULES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "token_k1": (_reversed, _each),
    "token_k2": (_squared, _each),
    "token_k3": (_schulman, _each),
    "seq_sum_k1": (_reversed, _sum),
    "seq_sum_k2": (_squared, _sum),
    "seq_sum_k3": (_schulman, _sum),
    "seq_mean_k1": (_reversed, _mean),
    "seq_mean_k2": (_squared, _mean),
    "seq_mean_k3": (_schulman, _mean),
    "seq_max_k2": (_squared, _largest),
    "seq_max_k3": (_schulman, _largest),
}


def m2po_kept(log_ratio: Tensor, advantages: Tensor, mask: Tensor, threshold: float, gather: Gather = HERE) -> Tensor:
    """Returns the model tokens that stay, (rows, response) bool: of the candidates the largest l^2 are dropped until the mean of
    the rest is at most `threshold`; other model tokens always stay.

    Over the whole batch, for which l^2 of all tokens goes to every process.  Equally large ones go together, so that the order
    of the rows does not matter.
    """
    chosen = candidates(log_ratio, advantages, mask)
    moments = masked(log_ratio, mask).square()
    every = gather(masked(moments, chosen))  # a candidate's is above 0, and padding is 0
    ordered = every[every > 0].sort(descending=True).values
    left = torch.arange(len(ordered), 0, -1, device=ordered.device)
    means = ordered.flip(0).cumsum(0).flip(0) / left  # means[k]: after dropping the k largest; falls with k
    num_dropped = int((means > threshold).sum().item())
    if num_dropped == 0:
        return mask.bool()
    return mask.bool() & ~(chosen & (moments >= ordered[num_dropped - 1]))


def candidates(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns the model tokens whose advantage and log-ratio have the same sign (neither is 0), (rows, response) bool."""
    return (masked(advantages, mask).sign() * masked(log_ratio, mask).sign() > 0) & mask.bool()


def second_moment(log_ratio: Tensor, chosen: Tensor) -> Tensor:
    """Returns the mean of l^2 over the chosen tokens, 0 without any; scalar."""
    return masked(log_ratio, chosen).square().sum() / chosen.sum().clamp(min=1)


class UpdateCorrection:
    """Computes old log-probs and token weights of a micro-batch, in the configured mode.

    Where the old log-probs have no forward pass of their own, the correction is computed in the policy's update.  It reads the
    log-ratio l in one of two modes, with the rollout engine's policy mu and the current policy pi:

        bypass   pi_old := mu; l = sg(log pi) - log mu, because log pi_old - log mu is 0: every correction would silently vanish
        A-3PO    pi_old is interpolated between mu and pi; l = log pi_old - log mu

    In bypass mode a loss that contains the ratio pi / pi_old has pi / mu in it already.  A weight on top would count it twice, so
    only rejection is applied.  A loss without a ratio of its own (its registry row requires "weights") gets the weight.  A
    rejected token has weight 0 and stays in the loss's denominators, unlike before the update, where rejected tokens leave the
    mask and with it the denominators.

    loss_requires: the `requires` of the policy loss's registry row.
    """

    def __init__(self, config: RolloutCorrectionConfig, loss_requires: AbstractSet[str]) -> None:
        self.config = config
        self.own_ratio = "weights" not in loss_requires
        self.applied = dataclasses.replace(config, rollout_is=None) if config.bypass_mode and self.own_ratio else config

    def anchor(self, log_probs: Tensor, micro: Mapping[str, Tensor]) -> AnchoredLogProbs:
        """Returns the anchor of a micro-batch.

        Columns read: old_log_probs and importance_weights if present; in bypass mode old_log_probs, which is mu, or without it
        rollout_log_probs; with A-3PO the latter and, if present, staleness.  log_probs: those of the current policy, (rows,
        response).
        """
        current, mask = log_probs.detach(), micro["response_mask"]
        if not self.config.in_update:
            first_step = "old_log_probs" not in micro
            old = current if first_step else micro["old_log_probs"]
            return AnchoredLogProbs(old_log_probs=old, weights=micro.get("importance_weights"), sums={})
        mu = self.behaviour(micro)
        assert mu is not None
        if self.config.bypass_mode:
            old, measured = mu, current
        else:
            staleness = micro["staleness"] if "staleness" in micro else torch.zeros_like(mask[:, 0])
            old = measured = proximal_log_probs(current, mu, staleness, mask)
        correction = correct(self.applied, log_ratios(measured, mu, mask), mask)
        weights = token_factors(correction).to(current.dtype) if self.applied.active else None
        return AnchoredLogProbs(old_log_probs=old, weights=weights, sums=correction.sums)

    def behaviour(self, rows: Mapping[str, Tensor]) -> Tensor | None:
        """Returns log mu, (rows, response), if the mismatch is measured in the update; None if the driver measures it."""
        if self.config.bypass_mode:
            return rows["old_log_probs"] if "old_log_probs" in rows else rows["rollout_log_probs"]
        measured_before = "old_log_probs" in rows and not self.config.in_update
        return rows["rollout_log_probs"] if "rollout_log_probs" in rows and not measured_before else None


@dataclass(slots=True, kw_only=True)
class AnchoredLogProbs:
    """The anchor of a policy loss: the log-probs that it compares with, and token weights, both (rows, response) without
    gradient.

    weights: None if no token is weighted.
    """

    old_log_probs: Tensor
    weights: Tensor | None
    sums: dict[str, Tensor]
