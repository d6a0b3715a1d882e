"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300, section 4.1.2) and, without the division by the
standard deviation, Dr. GRPO (Liu et al. 2025, arXiv 2503.20783); also over episodes, where a row is one call of the policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, SampleInputs, SampleOutputs
from rlhub.algorithms.statistics import group_statistics


@dataclass(slots=True, kw_only=True)
class GRPOKnobs:
    """norm_adv_by_std_in_grpo: divide by the group's standard deviation (False is Dr. GRPO)."""

    norm_adv_by_std_in_grpo: bool = True


def grpo(inputs: AdvantageInputs, knobs: GRPOKnobs) -> AdvantageOutputs:
    """Returns A_i = (R_i - mean_g) / (std_g + 1e-6) on every model token of sample i; the standard deviation is unbiased.

    The 1e-6 only keeps the division finite (elsewhere 1e-4 is added, which damps groups whose rewards barely differ).
    Exactly 0 for a group whose rewards are all equal (rounding noise over 1e-6 would otherwise be a large advantage) and
    for a group of one (elsewhere its reward is taken as the advantage); both are counted in the metrics.
    """
    return inputs.broadcast(per_sample(inputs.samples(), knobs))


def per_sample(inputs: SampleInputs, knobs: GRPOKnobs) -> SampleOutputs:
    """Returns A_i of each sample, (batch,)."""
    stats = group_statistics(inputs.rewards, inputs.group)
    advantages = stats.normalized(inputs.rewards, divide=knobs.norm_adv_by_std_in_grpo)
    return SampleOutputs(advantages=advantages, metrics=stats.metrics())


def chunk_grpo(inputs: AdvantageInputs, knobs: GRPOKnobs) -> AdvantageOutputs:
    """Returns A_e = (R_e - mean_g) / (std_g + 1e-6) on every token of every call of episode e.

    R_e is the sum of the rewards of the episode's calls, and each episode counts once in its group, however many calls it has.
    An episode of which a call was lost with its environment has no return: its advantage is 0, and its group does not see it.
    """
    assert inputs.group is not None and inputs.episode is not None, "chunk_grpo requires groups and episodes"
    numbers = {"rewards": inputs.outcome_rewards(), "episode": inputs.episode, "group": inputs.group}
    every = inputs.gather.each(numbers | {"valid": inputs.response_mask.any(1).long()})
    known, place = torch.unique(every["episode"], return_inverse=True)
    returns = torch.zeros(len(known), dtype=torch.float64).index_add_(0, place, every["rewards"])
    lost = torch.zeros(len(known), dtype=torch.int64).index_add_(0, place, 1 - every["valid"])
    group = torch.zeros(len(known), dtype=torch.int64)
    group[place] = every["group"]
    # An episode that lost a call gets a group of its own, below every other number.
    group = torch.where(lost > 0, group.amin().clamp(max=0) - 1 - torch.arange(len(known)), group) if len(known) else group
    stats = group_statistics(returns, group)
    advantages = stats.normalized(returns, divide=knobs.norm_adv_by_std_in_grpo)
    advantages = torch.where(lost > 0, torch.zeros_like(advantages), advantages)
    tokens = inputs.on_tokens(inputs.gather.own(advantages[place]))
    return AdvantageOutputs(advantages=tokens, returns=tokens, metrics=stats.metrics())
