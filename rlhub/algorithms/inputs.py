"""What goes into and comes out of advantage estimators and policy losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class AdvantageInputs:
    """The whole training batch (statistics are over the global batch).

    token_level_rewards: (batch, response) float, after any KL penalty.
    response_mask: (batch, response), 1 on tokens the model wrote.
    group: (batch,) int64, equal for samples of one prompt; None when the estimator does not require groups.
    values: (batch, response) float, the critic's; None when the estimator does not require values.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group: Tensor | None = None
    values: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class AdvantageOutputs:
    """advantages and returns, each (batch, response), 0 where response_mask is 0; metrics by name."""

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PolicyLossInputs:
    """One micro-batch, each (rows, response).  weights: per-token importance weights, or None.

    log_probs carries gradient; old_log_probs and advantages do not.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    weights: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class PolicyLossOutputs:
    """loss: (rows, response), 0 outside the mask, not yet aggregated.  sums: token sums that become metrics when divided by
    the global number of tokens."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
