"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7), with the dual clip of Ye et al. (2020,
arXiv 1912.09729) and separate lower and upper bounds ("clip-higher", Yu et al. 2025, arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import masked, masked_sum

LOG_RATIO_BOUND = 20.0  # exp(20) is finite in float32 and far outside any clip range


@dataclass(slots=True, kw_only=True)
class VanillaKnobs:
    """clip_ratio: eps of both bounds unless clip_ratio_low / clip_ratio_high set one of their own.
    clip_ratio_c: bound c > 1 of the dual clip on tokens of negative advantage."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c must be above 1 (it bounds the loss at -A c for A < 0), got {self.clip_ratio_c}")


def vanilla(inputs: PolicyLossInputs, knobs: VanillaKnobs) -> PolicyLossOutputs:
    """max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high)), and for A < 0 at most -A c, times the weight.

    rho = exp(log pi - log pi_old), the log-ratio clamped to +-20.  All tensors (rows, response).
    """
    mask, advantages = inputs.response_mask, masked(inputs.advantages, inputs.response_mask)
    low = knobs.clip_ratio if knobs.clip_ratio_low is None else knobs.clip_ratio_low
    high = knobs.clip_ratio if knobs.clip_ratio_high is None else knobs.clip_ratio_high
    log_ratio = masked(inputs.log_probs - inputs.old_log_probs, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(unclipped, clipped)
    bound = -advantages * knobs.clip_ratio_c
    negative = advantages < 0
    sums = {
        "pg_clipfrac": masked_sum((clipped > unclipped).to(ratio.dtype), mask),
        "pg_clipfrac_lower": masked_sum((negative & (loss > bound)).to(ratio.dtype), mask),
        "ppo_kl": masked_sum(-log_ratio.detach(), mask),
    }
    loss = torch.where(negative, torch.minimum(loss, bound), loss)
    if inputs.weights is not None:
        loss = loss * inputs.weights
    return PolicyLossOutputs(loss=masked(loss, mask), sums=sums)
