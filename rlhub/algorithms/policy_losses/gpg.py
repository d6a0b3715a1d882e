"""Group policy gradient (Chu et al. 2025, arXiv 2504.02546): the plain policy gradient, made for the estimator of that paper,
which centres rewards by group and makes up for groups without a signal."""

from __future__ import annotations

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.policy_losses.reinforce import reinforce


def gpg(inputs: PolicyLossInputs, knobs: None) -> PolicyLossOutputs:
    """-A log pi, times the weight: no ratio, no clip, no KL.  All tensors (rows, response)."""
    return reinforce(inputs, knobs)
