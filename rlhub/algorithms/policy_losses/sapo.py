"""Soft adaptive policy optimization (Gao et al. 2025, arXiv 2511.20347): a sigmoid gate on the ratio in place of the clip.

Choose loss_agg_mode=seq-mean-token-mean for the paper's objective.  Other implementations take that whatever is asked for; here
the other modes are honoured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.policy_losses.ratio import finished, log_ratio


@dataclass(slots=True, kw_only=True)
class SAPOKnobs:
    """tau_pos, tau_neg: how fast the gate closes away from ratio 1, for A > 0 and for all others; larger is tighter, and the
    paper closes it earlier on negative advantages."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ValueError(f"tau_pos and tau_neg must be positive, got {self.tau_pos} and {self.tau_neg}")


def sapo(inputs: PolicyLossInputs, knobs: SAPOKnobs) -> PolicyLossOutputs:
    """Returns -A sigmoid(tau (rho - 1)) 4 / tau, times the weight; rho = exp(log-ratio clamped to +-20).  All tensors (rows,
    response).

    The gradient is -A rho 4 p (1 - p), p = sigmoid(tau (rho - 1)): the plain one at rho = 1.  pg_gate: 4 p (1 - p), the part of
    the gradient that passes.  There is no hard clip: pg_clipfrac is the share of tokens where less than half of it passes.
    """
    advantages = masked(inputs.advantages, inputs.response_mask)
    tau = torch.where(advantages > 0, advantages.new_tensor(knobs.tau_pos), advantages.new_tensor(knobs.tau_neg))
    gate = torch.sigmoid(tau * (log_ratio(inputs).exp() - 1))
    passed = 4 * gate * (1 - gate)
    return finished(inputs, -advantages * gate * 4 / tau, (passed < 0.5) & (advantages != 0), pg_gate=passed)
