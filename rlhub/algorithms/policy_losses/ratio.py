"""The first and the last step of every policy loss: the log-ratio to the old policy, and the weighted loss with its metrics."""

from __future__ import annotations

from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked, masked_sum


def log_ratio(inputs: PolicyLossInputs) -> Tensor:
    """Returns log pi - log pi_old clamped to +-20 (no gradient beyond), 0 outside the mask; (rows, response)."""
    return masked(inputs.log_probs - inputs.old_log_probs, inputs.response_mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean over each row's tokens, (rows, 1); 0 for a row without any."""
    return masked_sum(values, mask, dim=1)[:, None] / mask.to(values.dtype).sum(1, keepdim=True).clamp(min=1)


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Returns max(-A rho, -A clip(rho, 1 - low, 1 + high)) and where the clip binds (bool): there no gradient flows."""
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return unclipped.maximum(clipped), clipped > unclipped


def bounds(clip_ratio: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Returns the eps of the lower and the upper bound: clip_ratio where none of their own is set."""
    return clip_ratio if low is None else low, clip_ratio if high is None else high


def finished(inputs: PolicyLossInputs, loss: Tensor, bounded: Tensor | None = None, **counted: Tensor) -> PolicyLossOutputs:
    """Returns the token loss times its weight, 0 outside the mask, with the sums that every loss reports.

    bounded: where the loss bounds or drops the token's own gradient (None: nowhere), reported as pg_clipfrac; counted: more
    token values to sum, by name; both (rows, response).  ppo_kl estimates KL(pi_old, pi) by the mean negative log-ratio.
    """
    mask = inputs.response_mask
    if inputs.weights is not None:
        loss = loss * masked(inputs.weights, mask).to(loss.dtype)
    ratio = log_ratio(inputs).detach()
    share = ratio.new_zeros(()) if bounded is None else masked_sum(bounded.to(ratio.dtype), mask)
    sums = {"pg_clipfrac": share, "ppo_kl": -ratio.sum()}
    sums |= {name: masked_sum(values.detach().to(ratio.dtype), mask) for name, values in counted.items()}
    return PolicyLossOutputs(loss=masked(loss, mask), sums=sums)
