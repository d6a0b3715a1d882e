"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7), with the dual clip of Ye et al. (2020,
arXiv 1912.09729) and separate lower and upper bounds ("clip-higher", Yu et al. 2025, arXiv 2503.14476).

With the log-probs of a proximal policy as old ones and pi_prox / mu as token weights it is decoupled PPO (Fu et al. 2025,
arXiv 2505.24298), so that has no loss of its own and the weight is applied in one place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.policy_losses.ratio import bounds, clipped_surrogate, finished, log_ratio


@dataclass(slots=True, kw_only=True)
class VanillaKnobs:
    """clip_ratio: eps of both bounds unless clip_ratio_low / clip_ratio_high set one of their own.
    clip_ratio_c: bound c > 1 of the dual clip on tokens of negative advantage; always on (elsewhere off until asked for), and a
    large number is as good as off."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c must be above 1 (it bounds the loss at -A c for A < 0), got {self.clip_ratio_c}")


def vanilla(inputs: PolicyLossInputs, knobs: VanillaKnobs) -> PolicyLossOutputs:
    """Returns max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high)), and for A < 0 at most -A c, times the weight.

    rho = exp(log pi - log pi_old), the log-ratio clamped to +-20.  All tensors (rows, response).  pg_clipfrac_lower: tokens
    that the dual clip bounds.
    """
    advantages = masked(inputs.advantages, inputs.response_mask)
    low, high = bounds(knobs.clip_ratio, knobs.clip_ratio_low, knobs.clip_ratio_high)
    loss, clipped = clipped_surrogate(advantages, log_ratio(inputs).exp(), low, high)
    bound = -advantages * knobs.clip_ratio_c
    beyond = (advantages < 0) & (loss > bound)
    loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return finished(inputs, loss, clipped, pg_clipfrac_lower=beyond)
