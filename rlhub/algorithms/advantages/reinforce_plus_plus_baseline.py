"""REINFORCE++ with a group baseline (Hu et al. 2025, arXiv 2501.03262, "REINFORCE++ w/ baseline")."""

from __future__ import annotations

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.statistics import group_statistics, whiten


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
    """Returns A = R_i - mean_g on every model token of sample i, whitened over the batch's model tokens.

    R_i - mean_g is exactly 0 for equal rewards and for a group of one (elsewhere R_i), both counted; whitening then moves
    these zeros with all others, by the batch's token mean.
    """
    assert inputs.group is not None, "reinforce_plus_plus_baseline requires groups"
    samples = inputs.samples()
    stats = group_statistics(samples.rewards, samples.group)
    centred = inputs.of_samples(stats.centred(samples.rewards))
    advantages = whiten(centred, inputs.response_mask, inputs.gather)
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics=stats.metrics())
