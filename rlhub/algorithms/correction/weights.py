"""Importance weights pi / mu on the policy loss: truncated (TIS, Yao et al. 2025, "Your efficient RL framework secretly brings
you off-policy RL training") or zero outside a band (IcePop, Ling team 2025, arXiv 2510.18855), by token or by sequence.

With the clipped surrogate and pi_old from a forward pass of its own this is decoupled PPO (AReaL, arXiv 2505.24298).  A-3PO
(arXiv 2512.06547) interpolates that proximal policy instead of a pass: the staler a token, the nearer it is to the current
policy, and a token of the newest published version needs none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked
from rlhub.algorithms.statistics import HERE, Gather, pairwise_sum, row_sums
from rlhub.config.sections.rollout_correction import Bounds

SMALLEST_MEAN = 1e-8  # a batch whose weights are all zero stays as it is


def log_ratios(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns l = sg(log pi) - log mu, (rows, response) float64, 0 where mask is 0 whatever stands there."""
    return masked(log_probs.detach().double() - rollout_log_probs.detach().double(), mask)


def token_ratios(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Returns exp(l_t), l clamped to +-20; (rows, response), 0 outside the mask."""
    return masked(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), mask)


def sequence_ratios(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Returns exp(sum_t l_t m_t) of each row on all of its tokens, the sum clamped to +-20; (rows, response), 0 outside the
    mask."""
    total = row_sums(log_ratio, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return masked(total.exp()[:, None].expand_as(log_ratio), mask)


RATIOS = {"token": token_ratios, "sequence": sequence_ratios}


def outside(ratios: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    """Returns the tokens whose ratio is beyond the bounds, (rows, response) bool."""
    beyond = ratios > bounds.upper
    if bounds.lower is not None:
        beyond = beyond | (ratios < bounds.lower)
    return beyond & mask.bool()


def bounded(ratios: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    """Returns min(ratio, upper); with a lower bound the ratio inside [lower, upper] and 0 outside."""
    if bounds.lower is None:
        return ratios.clamp(max=bounds.upper)
    return torch.where(outside(ratios, mask, bounds), torch.zeros_like(ratios), ratios)


def mean_weight(weights: Tensor, mask: Tensor, level: str, gather: Gather = HERE) -> Tensor:
    """Returns the divisor of batch normalisation, the mean over tokens, or over the sequences that have any (each counts
    once)."""
    present = mask.bool().any(1)
    if level == "sequence":  # equal on all of a row's tokens
        rows = {"total": masked(masked(weights, mask).amax(1), present), "count": present.long()}
    else:
        rows = {"total": row_sums(weights, mask), "count": mask.bool().sum(1)}
    found = gather.each(rows)
    return pairwise_sum(found["total"]) / found["count"].sum().clamp(min=1)


def normalized(weights: Tensor, mask: Tensor, level: str, gather: Gather = HERE) -> Tensor:
    """Returns weights / their mean over the WHOLE batch, after truncation; unchanged where that mean is 0."""
    mean = mean_weight(weights, mask, level, gather)
    return torch.where(mean > SMALLEST_MEAN, weights / mean.clamp(min=SMALLEST_MEAN), weights)


def proximal_log_probs(log_probs: Tensor, rollout_log_probs: Tensor, staleness: Tensor, mask: Tensor) -> Tensor:
    """Returns log pi_prox = log mu + ((d - 1) / d) (sg log pi - log mu) for d >= 1, sg log pi for d = 0.

    log_probs (current policy), rollout_log_probs (mu), mask: (rows, response).  staleness: d, whole policy versions, (rows,
    response) or (rows,).  Returns (rows, response) in log_probs' dtype, without gradient, 0 outside the mask.
    """
    versions = (staleness if staleness.dim() == 2 else staleness[:, None]).double()
    pi, mu = log_probs.detach().double(), rollout_log_probs.detach().double()
    share = (versions - 1) / versions.clamp(min=1)
    interpolated = torch.where(versions >= 1, mu + share * (pi - mu), pi)
    return masked(interpolated, mask).to(log_probs.dtype)
