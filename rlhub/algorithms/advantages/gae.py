"""Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equations 11-16)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.returns import scan, time_first
from rlhub.algorithms.statistics import whiten


@dataclass(slots=True, kw_only=True)
class GAEKnobs:
    """gamma: discount, in (0, 1].  lam: bias-variance trade-off of the estimator, in [0, 1]."""

    gamma: float = 1.0
    lam: float = 1.0


def gae(inputs: AdvantageInputs, knobs: GAEKnobs) -> AdvantageOutputs:
    """Returns A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; returns = A + V; A is then whitened.

    inputs: rewards and values (batch, response); the scans run over model tokens only: at a masked token V_{t+1} and
    A_{t+1} pass through unchanged, so tool output between turns neither discounts nor bootstraps.
    """
    assert inputs.values is not None, "gae requires values"
    mask = time_first(inputs.response_mask, inputs.values.dtype)
    rewards, values = masked(inputs.token_level_rewards.t(), mask), masked(inputs.values.t(), mask)
    next_values = torch.cat([scan(values, mask, 0.0)[1:], torch.zeros_like(values[:1])])
    deltas = rewards.add_(next_values, alpha=knobs.gamma).sub_(values).mul_(mask)
    advantages = scan(deltas, mask, knobs.gamma * knobs.lam)
    returns = masked(values.add_(advantages).t().contiguous(), inputs.response_mask)
    return AdvantageOutputs(advantages=whiten(advantages.t().contiguous(), inputs.response_mask, inputs.gather), returns=returns)
