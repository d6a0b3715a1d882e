"""On-policy RL with the optimal reward baseline (Hao et al. 2025, arXiv 2505.23585)."""

from __future__ import annotations

import torch

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, SampleInputs, SampleOutputs
from rlhub.algorithms.statistics import group_statistics


def opo(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
    """Returns A_i = R_i - b_g on every model token of sample i, b_g = sum L_i R_i / sum L_i over the group, L_i its model tokens.

    The weight stands for the squared norm of a sample's gradient, taken to grow with its length.  Exactly 0 for a group of
    equal rewards; in a group of one the baseline is 0 and A = R_i, as in the published implementation.  Both are counted.
    """
    return inputs.broadcast(per_sample(inputs.samples(), knobs))


def per_sample(inputs: SampleInputs, knobs: None) -> SampleOutputs:
    """Returns A_i of each sample, (batch,)."""
    rewards = inputs.rewards
    stats = group_statistics(rewards, inputs.group)
    lengths = inputs.num_tokens.to(rewards.dtype)
    baseline = stats.total(lengths * rewards) / stats.total(lengths).clamp(min=1)
    baseline = torch.where(stats.equal, rewards, torch.where(stats.size == 1, torch.zeros_like(baseline), baseline))
    return SampleOutputs(advantages=rewards - baseline, metrics=stats.metrics())
