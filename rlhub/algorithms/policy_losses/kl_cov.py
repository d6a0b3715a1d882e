"""KL-Cov (Cui et al. 2025, arXiv 2505.22617, section 4.2): the tokens with the highest covariance of advantage and
log-probability are held near the old policy, which keeps the policy's entropy up.

When the tokens are chosen, and how that departs from the paper, is said in `covariance`.  The penalty, like the paper's, has no
gradient on the old policy itself: it acts from the second optimizer step of a batch on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs, SelectionInputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.policy_losses.covariance import choose, quota, token_covariance
from rlhub.algorithms.policy_losses.ratio import finished, log_ratio


@dataclass(slots=True, kw_only=True)
class KLCovKnobs:
    """kl_cov_ratio: share of the mini-batch's tokens that are penalised, those of highest covariance (at least one).
    ppo_kl_coef: weight of the penalty."""

    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.kl_cov_ratio <= 1:
            raise ValueError(f"kl_cov_ratio is a share of the tokens, above 0 and at most 1, got {self.kl_cov_ratio}")


def select(inputs: SelectionInputs, knobs: KLCovKnobs) -> Tensor:
    """Returns the share of tokens with the highest covariance, equal ones by random key; (rows, response) uint8."""
    tokens = inputs.response_mask.bool()
    return choose(tokens, quota(knobs.kl_cov_ratio, tokens), inputs.keys, token_covariance(inputs))


def kl_cov(inputs: PolicyLossInputs, knobs: KLCovKnobs) -> PolicyLossOutputs:
    """Returns -A rho, plus ppo_kl_coef abs(log pi - log pi_old) on selected tokens, times the weight.  All tensors (rows,
    response).

    rho's logarithm is clamped to +-20, the penalty's is not.  There is no clip: pg_clipfrac is the share of penalised tokens.
    """
    assert inputs.selected is not None, "the loss requires its selection"
    mask, selected = inputs.response_mask, inputs.selected.bool()
    loss = -masked(inputs.advantages, mask) * log_ratio(inputs).exp()
    penalty = knobs.ppo_kl_coef * masked(inputs.log_probs - inputs.old_log_probs, mask).abs()
    return finished(inputs, torch.where(selected, loss + penalty, loss), selected, cov_selected=selected)
