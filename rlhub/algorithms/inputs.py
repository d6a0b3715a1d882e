"""What goes into and comes out of advantage estimators and policy losses.

An optional column is there when the part's registry row names it in `requires`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rlhub.algorithms.outcome import check_rewards


@dataclass(slots=True, kw_only=True)
class AdvantageInputs:
    """The whole training batch (statistics are over the global batch).  ProtocolError for a reward outside the mask.

    token_level_rewards: (batch, response) float, after any KL penalty.
    response_mask: (batch, response), 1 on tokens the model wrote.
    group: (batch,) int64, equal for samples of one prompt; None unless the estimator requires "groups".
    values: (batch, response) float, the critic's; requires "values".
    old_log_probs: (batch, response) float, log-probs of the policy at the start of the update; requires "old_log_probs".
    sum_pi_squared: (batch, response) float, sum over the vocabulary of the policy's squared probabilities at each token;
        requires "sum_pi_squared".
    baseline_rewards: (batch,) float, the reward of the prompt's greedy response; requires "baseline_rewards".
    reward_components: by name (batch,) float64, the scorer's own numbers of each sample; requires "reward_components".
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group: Tensor | None = None
    values: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    baseline_rewards: Tensor | None = None
    reward_components: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        check_rewards(self.token_level_rewards, self.response_mask)


@dataclass(slots=True, kw_only=True)
class AdvantageOutputs:
    """advantages and returns, each (batch, response), 0 where response_mask is 0; metrics by name."""

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PolicyLossInputs:
    """One micro-batch, whole rows of one mini-batch, each (rows, response).

    log_probs carries gradient; nothing else does.
    old_log_probs: of the proximal policy; equal to log_probs where the update takes one step on policy.
    weights: per-token importance weights that multiply the loss, or None.
    rollout_log_probs: of the policy that sampled the tokens; requires "rollout_log_probs".
    selected: 1 on the tokens that the loss's own `select` companion chose in the whole mini-batch; None without one.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    weights: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    selected: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class PolicyLossOutputs:
    """loss: (rows, response), 0 outside the mask, not yet aggregated.  sums: token sums that become metrics when divided by
    the global number of tokens."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SelectionInputs:
    """One whole mini-batch, before it is cut over ranks and micro-batches: what a loss's companion `select(inputs, knobs)`
    chooses tokens from.  It returns (rows, response), 1 on chosen tokens.

    old_log_probs: (rows, response), of the policy at the start of the update; advantages, response_mask: (rows, response).
    keys: (rows, response) float64 uniforms in [0, 1), a pure function of (seed, step, sample, position).
    """

    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    keys: Tensor
