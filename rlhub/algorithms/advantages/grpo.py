"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300, section 4.1.2) and, without the division by the
standard deviation, Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass

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
