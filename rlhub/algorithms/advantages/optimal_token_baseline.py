"""Optimal token baseline (arXiv 2602.07078): per token, the baseline that minimises the variance of the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.returns import rewards_to_go

NOISE_EPS = 8  # times the rounding of its dtype: a squared norm below that is rounding itself, and may be negative


@dataclass(slots=True, kw_only=True)
class OptimalTokenBaselineKnobs:
    """gamma: discount per model token, in (0, 1]; the paper's is 1."""

    gamma: float = 1.0


def optimal_token_baseline(inputs: AdvantageInputs, knobs: OptimalTokenBaselineKnobs) -> AdvantageOutputs:
    """Returns A_t = G_t - B_t on model tokens, with B_t = sum_i G_{i,t} W_{i,t} / sum_i W_{i,t} over the group.

    W_t = w_1 + ... + w_t over model tokens, w = 1 - 2 pi + sum_v pi_v^2: the squared norm of the token's score in logits,
    pi = exp(old_log_probs).  t counts model tokens, so rows with tool output between turns meet at equal positions of
    what the model wrote.  Where only one row of the group still writes (beyond the second longest, or a group of one),
    there is nobody to compare with and B = 0; so too where no row had a choice yet (W = 0).  returns = G.

    inputs: old_log_probs, sum_pi_squared (batch, response).
    """
    assert inputs.group is not None, "optimal_token_baseline requires groups"
    assert inputs.old_log_probs is not None, "optimal_token_baseline requires old_log_probs"
    assert inputs.sum_pi_squared is not None, "optimal_token_baseline requires sum_pi_squared"
    mask = inputs.response_mask
    returns = rewards_to_go(inputs.token_level_rewards, mask, knobs.gamma)
    weights = cumulative_score_norms(inputs.old_log_probs, inputs.sum_pi_squared, mask)
    baseline = weighted_means(returns.double(), weights, mask.bool(), inputs.group)
    return AdvantageOutputs(advantages=masked(returns - baseline.to(returns.dtype), mask), returns=returns)


def cumulative_score_norms(log_probs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    """Returns W_t, (batch, response) float64, 0 outside the mask."""
    norms = 1 - 2 * masked(log_probs, mask).double().exp() + masked(sum_pi_squared, mask).double()
    noise = NOISE_EPS * torch.finfo(sum_pi_squared.dtype).eps
    norms = torch.where(norms.abs() > noise, norms, torch.zeros_like(norms))
    return masked(masked(norms, mask).cumsum(1), mask)


def weighted_means(values: Tensor, weights: Tensor, keep: Tensor, group: Tensor) -> Tensor:
    """Returns, per model token, the weighted mean of `values` over the group's rows at the same count of model tokens, (batch,
    response) float64; 0 where one row alone is left or the weights add to 0.  values and weights are 0 outside `keep`."""
    _, index = torch.unique(group, return_inverse=True)
    width = keep.shape[1]
    slot = index[:, None] * width + (keep.long().cumsum(1) - 1).clamp(min=0)
    zeros = torch.zeros(max(len(group), 1) * width, dtype=values.dtype, device=values.device)

    def over_group(terms: Tensor) -> Tensor:
        return zeros.index_add(0, slot.flatten(), terms.flatten())

    weight = over_group(weights)
    shared = (over_group(keep.to(values.dtype)) > 1) & (weight != 0)
    means = torch.where(shared, over_group(values * weights) / weight, zeros)
    return means[slot]
