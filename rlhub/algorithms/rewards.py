"""Scaling token-level rewards before advantages are estimated.

Reward whitening of PPO from human preferences (Ziegler et al. 2019, arXiv 1909.08593, its published code; described in Huang
et al. 2024, arXiv 2403.17031, "reward whitening").
"""

from __future__ import annotations

from torch import Tensor

from rlhub.algorithms.masked import masked, masked_sum, whiten


def whiten_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """(r - mean) * rsqrt(var + 1e-8) + mean over the mask, 0 outside it: the spread becomes 1 and the mean stays.

    rewards, response_mask: (batch, response).  The variance is unbiased, over the global batch.  A token without reward gets
    mean (1 - 1 / std), the same on every token, so the sum over a response then depends on its length.
    """
    wide = masked(rewards, response_mask).double()
    mean = masked_sum(wide, response_mask) / response_mask.sum().clamp(min=1)
    return masked(whiten(wide, response_mask) + mean, response_mask).to(rewards.dtype)
