"""From token-level rewards to returns, and the critic's loss on them: reward whitening, rewards to go, the scan from a response's
end, and the clipped squared error (Schulman et al. 2017, reference implementation of PPO).

Scans run time first, (response, batch) in contiguous memory, so that each step reads a few whole lines of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossOutputs
from rlhub.algorithms.masked import masked, masked_sum
from rlhub.algorithms.statistics import HERE, Gather, batch_moments, row_moments, whitened


def whiten_rewards(rewards: Tensor, response_mask: Tensor, gather: Gather = HERE) -> Tensor:
    """Returns (r - mean) * rsqrt(var + 1e-8) + mean over the mask, 0 outside it: the spread becomes 1 and the mean stays.

    rewards, response_mask: (rows, response).  The variance is unbiased, over the whole batch.  A token without reward gets
    mean (1 - 1 / std), the same on every token, so the sum over a response then depends on its length.

    It is the reward whitening of PPO from human preferences (Ziegler et al. 2019, arXiv 1909.08593, its published code; described
    in Huang et al. 2024, arXiv 2403.17031, "reward whitening").
    """
    wide, moments = rewards.double(), batch_moments(gather(row_moments(rewards, response_mask)))
    return masked(whitened(wide, response_mask, moments) + moments.mean, response_mask).to(rewards.dtype)


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Returns G_t = r_t + gamma G_{t+1} over model tokens, (batch, response), 0 outside the mask.

    At a masked token G is carried through unchanged, so tool output between turns does not discount; a reward there is not
    read.  Without discount it is a cumulative sum.
    """
    if gamma == 1.0:
        return masked(masked(token_level_rewards, response_mask).flip(1).cumsum(1).flip(1), response_mask)
    mask = time_first(response_mask, token_level_rewards.dtype)
    sums = scan(masked(token_level_rewards.t(), mask), mask, gamma)
    return masked(sums.t(), response_mask)


def time_first(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask as zeros and ones of `dtype`, (response, batch)."""
    return mask.to(dtype).t().contiguous()


def scan(terms: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Returns S_t = x_t + decay S_{t+1} where the mask is 1, S_t = S_{t+1} where it is 0; terms are finite and 0 there."""
    factor = (1 - mask).add_(mask, alpha=decay)
    sums = torch.empty_like(factor)
    following = torch.zeros(mask.shape[1:], dtype=mask.dtype, device=mask.device)
    for out, term, weight in zip(*(reversed(x.unbind(0)) for x in (sums, terms, factor)), strict=True):
        following = torch.addcmul(term, weight, following, out=out)
    return sums


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, cliprange: float) -> PolicyLossOutputs:
    """Returns 0.5 max((V - G)^2, (clip(V, V_old +- cliprange) - G)^2) per token, (rows, response), 0 outside the mask.

    The sums behind the explained variance are float64: it is a small difference of large numbers.
    """
    values, old_values, returns = (masked(column, response_mask) for column in (values, old_values, returns))
    clipped = values.clamp(old_values - cliprange, old_values + cliprange)  # exactly V inside: rounding is no clip
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * torch.maximum(plain_error, clipped_error)
    detached, targets = values.detach().double(), returns.double()
    sums = {
        "vf_clipfrac": masked_sum((clipped_error > plain_error).to(values.dtype), response_mask),
        "vpred": masked_sum(detached, response_mask),
        "squared_error": masked_sum((detached - targets).square(), response_mask),
        "returns": masked_sum(targets, response_mask),
        "returns_squared": masked_sum(targets.square(), response_mask),
    }
    return PolicyLossOutputs(loss=masked(loss, response_mask), sums=sums)
