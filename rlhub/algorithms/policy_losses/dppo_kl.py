"""DPPO with the Bernoulli KL of the sampled token (Qi et al. 2026, arXiv 2602.04879, "binary KL")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.policy_losses.divergence import Limits, divergence_bounded

OTHERS_EPS = 1e-8  # keeps the logarithm finite where the sampled token has all the probability


@dataclass(slots=True, kw_only=True)
class DPPOKLKnobs:
    """divergence_low, divergence_high: a token that moves away from the rollout policy is dropped beyond this KL (nats), for
    A < 0 and for A > 0.  ratio_cap: largest importance ratio (section 5.4 of the paper: large, since it biases)."""

    divergence_low: float = 0.05
    divergence_high: float = 0.05
    ratio_cap: float = 20.0


def bernoulli_kl(log_probs: Tensor, anchor: Tensor) -> Tensor:
    """Returns KL(mu, pi) between (sampled token, any other): mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))."""
    others, others_anchor = (-torch.expm1(x.clamp(max=0)) + OTHERS_EPS for x in (log_probs, anchor))
    return anchor.exp() * (anchor - log_probs) + others_anchor * (others_anchor / others).log()


def dppo_kl(inputs: PolicyLossInputs, knobs: DPPOKLKnobs) -> PolicyLossOutputs:
    """Returns -A sg(min(pi / mu, ratio_cap)) log pi, tokens dropped by Bernoulli KL; see `divergence_bounded`."""
    limits = Limits(low=knobs.divergence_low, high=knobs.divergence_high, ratio_cap=knobs.ratio_cap)
    return divergence_bounded(inputs, limits, bernoulli_kl)
