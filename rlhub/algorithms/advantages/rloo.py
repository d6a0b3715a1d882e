"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740, equation 8)."""

from __future__ import annotations

import torch

from rlhub.algorithms.groups import group_statistics, outcome_rewards
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.masked import masked


def rloo(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
    """A_i = R_i - mean of the others = n / (n - 1) (R_i - mean_g) on every model token of sample i; 0 for a group of one."""
    assert inputs.group is not None, "rloo requires groups"
    rewards = outcome_rewards(inputs.token_level_rewards, inputs.response_mask)
    stats = group_statistics(rewards, inputs.group)
    advantage = stats.size / (stats.size - 1).clamp(min=1) * (rewards - stats.mean)
    advantage = torch.where(stats.equal | (stats.size == 1), torch.zeros_like(advantage), advantage)
    advantages = masked(
        advantage.to(inputs.token_level_rewards.dtype)[:, None].expand(inputs.response_mask.shape), inputs.response_mask
    )
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics=stats.metrics())
