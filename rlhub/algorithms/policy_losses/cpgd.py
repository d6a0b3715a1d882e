"""Clipped policy gradient with policy drift (Liu et al. 2025, arXiv 2505.12504): the log-probability is clipped instead of the
ratio, so that no importance weight multiplies the gradient, and a drift term pulls back to the old policy.

The paper's weights of the advantages are an estimator's business: a loss sees no groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.policy_losses.ratio import bounds, finished, log_ratio


@dataclass(slots=True, kw_only=True)
class CPGDKnobs:
    """clip_ratio: the probability stays within [1 - eps, 1 + eps] times the old one, unless clip_ratio_low / clip_ratio_high set
    an eps of their own.  drift_coef: weight lambda of the drift; drift_bound: largest rho - 1 that it is weighted with."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    drift_coef: float = 0.001
    drift_bound: float = 2.0


def cpgd(inputs: PolicyLossInputs, knobs: CPGDKnobs) -> PolicyLossOutputs:
    """Returns -A clip(log pi) + lambda sg(min(rho - 1, drift_bound)) log pi, times the weight; clip: for A > 0 at most log pi_old
    + log(1 + eps_high), else at least log pi_old + log(1 - eps_low).

    All tensors (rows, response).  The drift's gradient is that of KL(pi_old, pi) up to its bound.  rho's logarithm is clamped
    to +-20.  policy_drift: rho - 1 as bounded.
    """
    mask = inputs.response_mask
    advantages, log_probs, old = (masked(x, mask) for x in (inputs.advantages, inputs.log_probs, inputs.old_log_probs))
    low, high = bounds(knobs.clip_ratio, knobs.clip_ratio_low, knobs.clip_ratio_high)
    ceiling, floor = old + math.log1p(high), old + (math.log1p(-low) if low < 1 else -math.inf)
    clipped = torch.where(advantages > 0, log_probs.clamp(max=ceiling), log_probs.clamp(min=floor))
    drift = (log_ratio(inputs).detach().exp() - 1).clamp(max=knobs.drift_bound)
    loss = -advantages * clipped + knobs.drift_coef * drift * log_probs
    return finished(inputs, loss, (clipped != log_probs) & (advantages != 0), policy_drift=drift)
