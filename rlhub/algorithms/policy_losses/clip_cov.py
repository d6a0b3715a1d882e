"""Clip-Cov (Cui et al. 2025, arXiv 2505.22617, section 4.2): a few tokens, drawn from those whose covariance of advantage and
log-probability is high, take no part in the update, which keeps the policy's entropy up.

When the tokens are chosen, and how that departs from the paper, is said in `covariance`.  Like the paper's, the surrogate has
no dual clip; its log-ratio is clamped to +-20.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs, SelectionInputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.policy_losses.covariance import choose, quota, token_covariance
from rlhub.algorithms.policy_losses.ratio import bounds, clipped_surrogate, finished, log_ratio


@dataclass(slots=True, kw_only=True)
class ClipCovKnobs:
    """clip_ratio, clip_ratio_low, clip_ratio_high: PPO's bounds.  clip_cov_ratio: share of the mini-batch's tokens to leave out
    (at least one token, at most all of the band); clip_cov_lb, clip_cov_ub: the band of covariance they are drawn from."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_cov_ratio <= 1:
            raise ValueError(f"clip_cov_ratio is a share of the tokens, above 0 and at most 1, got {self.clip_cov_ratio}")
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb must be below clip_cov_ub, got {self.clip_cov_lb} and {self.clip_cov_ub}")


def select(inputs: SelectionInputs, knobs: ClipCovKnobs) -> Tensor:
    """Returns a random share of the tokens with covariance in (lb, ub); (rows, response) uint8."""
    covariance = token_covariance(inputs)
    band = (covariance > knobs.clip_cov_lb) & (covariance < knobs.clip_cov_ub) & inputs.response_mask.bool()
    return choose(band, quota(knobs.clip_cov_ratio, inputs.response_mask), inputs.keys)


def clip_cov(inputs: PolicyLossInputs, knobs: ClipCovKnobs) -> PolicyLossOutputs:
    """Returns max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high)) times the weight, 0 on selected tokens.  All tensors (rows,
    response).

    pg_clipfrac: tokens that either clip leaves without gradient; cov_selected: those left out by covariance.
    """
    assert inputs.selected is not None, "the loss requires its selection"
    advantages, selected = masked(inputs.advantages, inputs.response_mask), inputs.selected.bool()
    low, high = bounds(knobs.clip_ratio, knobs.clip_ratio_low, knobs.clip_ratio_high)
    loss, clipped = clipped_surrogate(advantages, log_ratio(inputs).exp(), low, high)
    return finished(inputs, masked(loss, ~selected), clipped | selected, cov_selected=selected)
