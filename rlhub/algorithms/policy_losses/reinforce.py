"""The policy gradient (Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
learning"), without ratio or clip; and, as the same function, the loss of group policy gradient (Chu et al. 2025, arXiv
2504.02546), whose estimator centres rewards by group and makes up for groups without a signal.

Exact on policy: one optimizer step a batch (ppo_mini_batch_size = train_batch_size, ppo_epochs 1).  Its value is no measure
of progress; only its gradient means something.
"""

from __future__ import annotations

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.policy_losses.ratio import finished


def reinforce(inputs: PolicyLossInputs, knobs: None) -> PolicyLossOutputs:
    """Returns -A log pi, times the weight.  All tensors (rows, response).  Nothing is bounded: pg_clipfrac is 0."""
    mask = inputs.response_mask
    return finished(inputs, -masked(inputs.advantages, mask) * masked(inputs.log_probs, mask))


def gpg(inputs: PolicyLossInputs, knobs: None) -> PolicyLossOutputs:
    """Returns -A log pi, times the weight: no ratio, no clip, no KL.  All tensors (rows, response)."""
    return reinforce(inputs, knobs)
