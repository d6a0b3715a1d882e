"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740, equation 8)."""

from __future__ import annotations

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, SampleInputs, SampleOutputs
from rlhub.algorithms.statistics import group_statistics


def rloo(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
    """Returns A_i = R_i - mean of the others = n / (n - 1) (R_i - mean_g) on every model token of sample i.

    Exactly 0 for a group of equal rewards and for a group of one; both are counted in the metrics.
    """
    return inputs.broadcast(per_sample(inputs.samples(), knobs))


def per_sample(inputs: SampleInputs, knobs: None) -> SampleOutputs:
    """Returns A_i of each sample, (batch,)."""
    stats = group_statistics(inputs.rewards, inputs.group)
    advantages = stats.size / (stats.size - 1).clamp(min=1) * stats.centred(inputs.rewards)
    return SampleOutputs(advantages=advantages, metrics=stats.metrics())
