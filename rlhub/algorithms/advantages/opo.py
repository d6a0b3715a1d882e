"""On-policy RL with the optimal reward baseline (Hao et al. 2025, arXiv 2505.23585)."""

from __future__ import annotations

import torch

from rlhub.algorithms.groups import group_statistics
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs


def opo(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
    """Returns A_i = R_i - b_g on every model token of sample i, b_g = sum L_i R_i / sum L_i over the group, L_i its model tokens.

    The weight stands for the squared norm of a sample's gradient, taken to grow with its length.  Exactly 0 for a group of
    equal rewards; in a group of one the baseline is 0 and A = R_i, as in the published implementation.  Both are counted.
    """
    assert inputs.group is not None, "opo requires groups"
    rewards = inputs.outcome_rewards()
    stats = group_statistics(rewards, inputs.group)
    lengths = inputs.response_mask.sum(1).to(rewards.dtype)
    baseline = stats.total(lengths * rewards) / stats.total(lengths).clamp(min=1)
    baseline = torch.where(stats.equal, rewards, torch.where(stats.size == 1, torch.zeros_like(baseline), baseline))
    advantages = inputs.on_tokens(rewards - baseline)
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics=stats.metrics())
