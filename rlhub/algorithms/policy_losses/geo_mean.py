"""Geometric-mean policy optimization (Zhao et al. 2025, arXiv 2507.20673): the ratio of a sequence is the geometric mean of its
tokens' ratios, each clipped first.

Where other implementations differ: they fix the aggregation to the mean over sequences, average advantages and weights over
the sequence before the product, and count clips on the side where nothing is clipped.  Here each token keeps its own advantage
and weight and loss_agg_mode is honoured; with seq-mean-token-mean and one advantage a sequence, the paper's objective comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked
from rlhub.algorithms.policy_losses.ratio import finished, row_mean


@dataclass(slots=True, kw_only=True)
class GeoMeanKnobs:
    """clip_low, clip_high: a token's log-ratio is at least -clip_low where A < 0 and at most clip_high where A > 0; logarithms,
    wider than PPO's bounds (the paper's: ratios in (e^-0.4, e^0.4))."""

    clip_low: float = 0.4
    clip_high: float = 0.4


def geo_mean(inputs: PolicyLossInputs, knobs: GeoMeanKnobs) -> PolicyLossOutputs:
    """Returns -A exp(mean_t d_t), times the weight; d = log pi - log pi_old clipped by the sign of A: min(d, clip_high) for A >
    0, max(d, -clip_low) for A < 0, both for A = 0 (such a token must not drive the ratio of its row).

    All tensors (rows, response), whole rows: each token's loss has gradient in all tokens of its row.  The mean is clamped to
    +-20, without gradient beyond.
    """
    mask = inputs.response_mask
    advantages = masked(inputs.advantages, mask)
    plain = masked(inputs.log_probs - inputs.old_log_probs, mask)
    capped = torch.where(advantages >= 0, plain.clamp(max=knobs.clip_high), plain)
    clipped = torch.where(advantages <= 0, capped.clamp(min=-knobs.clip_low), capped)
    ratio = row_mean(clipped, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return finished(inputs, -advantages * ratio, clipped != plain)
