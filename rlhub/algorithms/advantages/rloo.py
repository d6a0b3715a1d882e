"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740, equation 8)."""

from __future__ import annotations

from rlhub.algorithms.groups import group_statistics
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs


def rloo(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
    """Returns A_i = R_i - mean of the others = n / (n - 1) (R_i - mean_g) on every model token of sample i.

    Exactly 0 for a group of equal rewards and for a group of one; both are counted in the metrics.
    """
    assert inputs.group is not None, "rloo requires groups"
    rewards = inputs.outcome_rewards()
    stats = group_statistics(rewards, inputs.group)
    per_sample = stats.size / (stats.size - 1).clamp(min=1) * stats.centred(rewards)
    advantages = inputs.on_tokens(per_sample)
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics=stats.metrics())
