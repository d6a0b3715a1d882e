"""Advantage weights of CPGD (clipped policy gradient with policy drift, arXiv 2505.12504); the loss has a file of its own,
since a loss does not see groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, SampleInputs, SampleOutputs
from rlhub.algorithms.statistics import GroupStatistics, group_statistics

WEIGHTINGS = ("std", "clip-scaled", "plain")
MAX_SCALE = 3.0  # the paper's bound


@dataclass(slots=True, kw_only=True)
class CPGDKnobs:
    """weighting: what R_i - mean_g is multiplied by.  std: 1 / (std_g + 1e-6); clip-scaled: number of groups / number of
    groups with spread, at most 3, as if the groups without a signal had been filtered; plain: 1."""

    weighting: str = "std"

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise ValueError(f"weighting={self.weighting!r} is not one of {', '.join(WEIGHTINGS)}")


def cpgd(inputs: AdvantageInputs, knobs: CPGDKnobs) -> AdvantageOutputs:
    """Returns A_i = (R_i - mean_g) times the chosen weight on every model token of sample i.

    Exactly 0 for a group of equal rewards and for a group of one, both counted.  Groups without any model token do not
    count in the scale.
    """
    return inputs.broadcast(per_sample(inputs.samples(), knobs))


def per_sample(inputs: SampleInputs, knobs: CPGDKnobs) -> SampleOutputs:
    """Returns A_i of each sample, (batch,)."""
    stats = group_statistics(inputs.rewards, inputs.group)
    advantages, metrics = stats.normalized(inputs.rewards, divide=knobs.weighting == "std"), stats.metrics()
    if knobs.weighting == "clip-scaled":
        scale = spread_scale(stats, inputs.num_tokens)
        advantages, metrics["groups/cpgd_scale"] = scale * advantages, scale
    return SampleOutputs(advantages=advantages, metrics=metrics)


def spread_scale(stats: GroupStatistics, num_tokens: Tensor) -> float:
    """Returns the number of groups / the number of groups with spread, at most 3; 3 where none has."""
    tokens = stats.total(num_tokens.to(torch.float64))
    first = 1 / stats.size  # each row is this share of its group, so the shares of a group add to 1
    groups = torch.where(tokens > 0, first, 0.0).sum()
    with_spread = torch.where(stats.flat | (tokens == 0), 0.0, first).sum()
    return min(round(groups.item()) / max(round(with_spread.item()), 1), MAX_SCALE)
