"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300, section 4.1.2) and, without the division by the
standard deviation, Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.groups import group_statistics, outcome_rewards
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.masked import masked

STD_EPS = 1e-6  # keeps the division finite; the published implementation uses the same


@dataclass(slots=True, kw_only=True)
class GRPOKnobs:
    """norm_adv_by_std_in_grpo: divide by the group's standard deviation (False is Dr. GRPO)."""

    norm_adv_by_std_in_grpo: bool = True


def grpo(inputs: AdvantageInputs, knobs: GRPOKnobs) -> AdvantageOutputs:
    """A_i = (R_i - mean_g) / (std_g + 1e-6) on every model token of sample i; the standard deviation is unbiased.

    Exactly 0 for a group whose rewards are all equal (rounding noise over 1e-6 would otherwise be a large advantage) and
    for a group of one; both are counted in the metrics.
    """
    assert inputs.group is not None, "grpo requires groups"
    rewards = outcome_rewards(inputs.token_level_rewards, inputs.response_mask)
    stats = group_statistics(rewards, inputs.group)
    centred = rewards - stats.mean
    if knobs.norm_adv_by_std_in_grpo:
        centred = centred / (stats.std + STD_EPS)
    centred = torch.where(stats.equal | (stats.size == 1), torch.zeros_like(centred), centred)
    advantages = masked(
        centred.to(inputs.token_level_rewards.dtype)[:, None].expand(inputs.response_mask.shape), inputs.response_mask
    )
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics=stats.metrics())
