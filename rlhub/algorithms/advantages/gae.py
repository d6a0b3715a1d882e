"""Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equations 11-16)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.masked import masked, whiten


@dataclass(slots=True, kw_only=True)
class GAEKnobs:
    """gamma: discount, in (0, 1].  lam: bias-variance trade-off of the estimator, in [0, 1]."""

    gamma: float = 1.0
    lam: float = 1.0


def gae(inputs: AdvantageInputs, knobs: GAEKnobs) -> AdvantageOutputs:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; returns = A + V; A is then whitened.

    inputs: rewards and values (batch, response); the scan runs over model tokens only: at a masked token V_{t+1} and
    A_{t+1} pass through unchanged, so tool output between turns neither discounts nor bootstraps.
    Raises ValueError when a reward sits on a masked token, where it would be lost.
    """
    assert inputs.values is not None, "gae requires values"
    mask = inputs.response_mask.bool()
    lost = (inputs.token_level_rewards.nan_to_num(nan=0.0).ne(0) & ~mask).any(1) & mask.any(1)
    if bool(lost.any()):
        row = int(lost.nonzero()[0].item())
        raise ValueError(f"row {row} has a reward on a token outside response_mask; put outcome scores on the last model token")
    # time-major and contiguous: each step of the scan reads one cache-friendly line
    rewards = masked(inputs.token_level_rewards, mask).t().contiguous()
    values = masked(inputs.values, mask).t().contiguous()
    keep = mask.t().contiguous()
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[0]) if values.numel() else values.new_zeros(values.shape[1])
    next_advantage = next_value
    for t in range(values.shape[0] - 1, -1, -1):
        delta = rewards[t] + knobs.gamma * next_value - values[t]
        advantage = delta + knobs.gamma * knobs.lam * next_advantage
        next_advantage = torch.where(keep[t], advantage, next_advantage)
        next_value = torch.where(keep[t], values[t], next_value)
        advantages[t] = next_advantage
    advantages = masked(advantages.t(), mask)
    returns = masked(advantages + values.t(), mask)
    return AdvantageOutputs(advantages=whiten(advantages, mask), returns=returns)
