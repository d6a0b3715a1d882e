"""DPPO with the total variation of the sampled token (Qi et al. 2026, arXiv 2602.04879, "binary TV")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.policy_losses.divergence import Limits, divergence_bounded


@dataclass(slots=True, kw_only=True)
class DPPOTVKnobs:
    """divergence_low, divergence_high: a token that moves away from the rollout policy is dropped beyond this total variation,
    for A < 0 and for A > 0; in [0, 1].  ratio_cap: largest importance ratio (section 5.4 of the paper: large, for it biases)."""

    divergence_low: float = 0.15
    divergence_high: float = 0.15
    ratio_cap: float = 20.0


def total_variation(log_probs: Tensor, anchor: Tensor) -> Tensor:
    """Returns abs(pi - mu) of the sampled token: the total variation between (it, any other token) under the two policies."""
    return (log_probs.exp() - anchor.exp()).abs()


def dppo_tv(inputs: PolicyLossInputs, knobs: DPPOTVKnobs) -> PolicyLossOutputs:
    """Returns -A sg(min(pi / mu, ratio_cap)) log pi, tokens dropped by total variation; see `divergence_bounded`."""
    limits = Limits(low=knobs.divergence_low, high=knobs.divergence_high, ratio_cap=knobs.ratio_cap)
    return divergence_bounded(inputs, limits, total_variation)
