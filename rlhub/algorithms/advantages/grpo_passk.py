"""Pass@k training: only the sample that decides a group's best reward learns (Tang et al. 2025, arXiv 2503.19595)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, SampleInputs, SampleOutputs
from rlhub.algorithms.statistics import group_statistics


@dataclass(slots=True, kw_only=True)
class GRPOPassKKnobs:
    """norm_adv_by_std_in_grpo: divide by the group's standard deviation, as grpo does."""

    norm_adv_by_std_in_grpo: bool = True


def grpo_passk(inputs: AdvantageInputs, knobs: GRPOPassKKnobs) -> AdvantageOutputs:
    """Returns A = R_max - R_2nd on every model token of a group's best sample, 0 on the others; divided by std_g + 1e-6 like
    grpo.

    Two samples that share the best reward leave nobody ahead: 0.  0 also for equal rewards and for a group of one, both
    counted (elsewhere a group of one, which one lost sample can make, is an error).
    """
    return inputs.broadcast(per_sample(inputs.samples(), knobs))


def per_sample(inputs: SampleInputs, knobs: GRPOPassKKnobs) -> SampleOutputs:
    """Returns A_i of each sample, (batch,)."""
    rewards = inputs.rewards
    stats = group_statistics(rewards, inputs.group)
    nothing = torch.full_like(rewards, -torch.inf)
    best = rewards == stats.top(rewards)
    alone = best & (stats.total(best.to(rewards.dtype)) == 1) & ~stats.flat
    lead = rewards - stats.top(torch.where(best, nothing, rewards))
    if knobs.norm_adv_by_std_in_grpo:
        lead = stats.divided(lead)
    return SampleOutputs(advantages=torch.where(alone, lead, torch.zeros_like(lead)), metrics=stats.metrics())
