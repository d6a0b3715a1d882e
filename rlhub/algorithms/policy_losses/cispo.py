"""Clipped importance-sampling weights (MiniMax-M1 2025, arXiv 2506.13585, equation 4): the weight is clipped, the token keeps
its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.policy_losses.ratio import finished, log_ratio


@dataclass(slots=True, kw_only=True)
class CISPOKnobs:
    """clip_high: the weight is at most 1 + clip_high (elsewhere the bound itself is given); larger is less biased and noisier
    (ratios up to 5 are in use).
    clip_low: it is at least 1 - clip_low; None, as in the paper: no lower bound.  (Implementations that read PPO's clip_ratio
    here bound it below at 0.8, which makes tokens that became unlikely count too much.)"""

    clip_high: float = 0.2
    clip_low: float | None = None


def cispo(inputs: PolicyLossInputs, knobs: CISPOKnobs) -> PolicyLossOutputs:
    """Returns -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi, times the weight; the log-ratio clamped to +-20.

    All tensors (rows, response).  pg_clipfrac: tokens whose weight is clipped; they still learn.
    """
    mask = inputs.response_mask
    ratio = log_ratio(inputs).detach().exp()
    weight = ratio.clamp(max=1 + knobs.clip_high)
    if knobs.clip_low is not None:
        weight = weight.clamp(min=1 - knobs.clip_low)
    advantages = masked(inputs.advantages, mask)
    return finished(inputs, -weight * advantages * masked(inputs.log_probs, mask), weight != ratio)
