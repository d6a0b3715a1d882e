"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300) over episodes, where a row of the batch is one call of
the policy: the returns of episodes that began in the same state are compared."""

from __future__ import annotations

import torch

from rlhub.algorithms.advantages.grpo import GRPOKnobs
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.statistics import group_statistics

__all__ = ["GRPOKnobs", "chunk_grpo"]


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
