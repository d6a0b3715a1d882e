"""Divergence proximal policy optimization (Qi et al. 2026, arXiv 2602.04879): a token is dropped when it moves away from the
policy that sampled it and the two already differ too much; the measure of that difference is the loss's own.

Everything is relative to mu, the rollout policy, as in the paper: the ratio pi / mu corrects for the policy that sampled, so
token weights pi_old / mu of a rollout correction would correct twice (use its masks only).  Other implementations take whatever
old policy they are given, the recomputed one by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked
from rlhub.algorithms.policy_losses.ratio import finished

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(log pi, log mu) of the sampled tokens -> how far apart the policies are there, at least 0."""


@dataclass(slots=True, kw_only=True)
class Limits:
    """low: largest divergence for A < 0; high: for A > 0; ratio_cap: the ratio counts at most this much."""

    low: float
    high: float
    ratio_cap: float


def divergence_bounded(inputs: PolicyLossInputs, limits: Limits, divergence: Divergence) -> PolicyLossOutputs:
    """Returns -A sg(min(pi / mu, ratio_cap)) log pi, times the weight, 0 for dropped tokens.  All tensors (rows, response).

    Dropped: A > 0, pi > mu and divergence > high, or A < 0, pi < mu and divergence > low.  log pi - log mu is clamped to +-20.
    pg_clipfrac: tokens dropped; pg_ratio_capped: tokens kept whose ratio was capped.
    """
    assert inputs.rollout_log_probs is not None, "the loss requires rollout_log_probs"
    mask = inputs.response_mask
    advantages, log_probs = masked(inputs.advantages, mask), masked(inputs.log_probs, mask)
    now, anchor = log_probs.detach(), masked(inputs.rollout_log_probs, mask)
    distance = divergence(now.double(), anchor.double())  # a small difference of large numbers
    upwards = (advantages > 0) & (now > anchor) & (distance > limits.high)
    downwards = (advantages < 0) & (now < anchor) & (distance > limits.low)
    dropped = upwards | downwards
    ratio = (now - anchor).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss = -advantages * ratio.clamp(max=limits.ratio_cap) * log_probs
    return finished(inputs, masked(loss, ~dropped), dropped, pg_ratio_capped=(ratio > limits.ratio_cap) & ~dropped)
