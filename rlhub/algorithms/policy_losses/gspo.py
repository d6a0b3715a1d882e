"""Group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071), in its token form (section 4.3): the ratio of the
whole sequence is clipped, and each token carries its own advantage.

Choose loss_agg_mode=seq-mean-token-mean for the paper's objective; the other modes are honoured.  The bounds are knobs of
their own: the ratio is a geometric mean over the sequence and lies within a few 1e-4 of 1, so PPO's 0.2, which other
implementations read here, never clips.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked
from rlhub.algorithms.policy_losses.ratio import clipped_surrogate, finished, row_mean


@dataclass(slots=True, kw_only=True)
class GSPOKnobs:
    """clip_low, clip_high: the sequence ratio is clipped to [1 - clip_low, 1 + clip_high] (section 5.1 of the paper)."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4


def gspo(inputs: PolicyLossInputs, knobs: GSPOKnobs) -> PolicyLossOutputs:
    """Returns max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), times the weight; s has the value of s_i and the token's
    gradient: s_i = exp(mean_t (log pi - log pi_old)), log s_{i,t} = log pi - sg(log pi) + sg(log s_i).

    All tensors (rows, response), whole rows.  log s_i is clamped to +-20, without gradient beyond.
    """
    mask = inputs.response_mask
    log_probs, advantages = masked(inputs.log_probs, mask), masked(inputs.advantages, mask)
    sequence = row_mean(masked(inputs.log_probs - inputs.old_log_probs, mask).detach(), mask)
    ratio = (log_probs - log_probs.detach() + sequence).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss, clipped = clipped_surrogate(advantages, ratio, knobs.clip_low, knobs.clip_high)
    return finished(inputs, loss, clipped)
