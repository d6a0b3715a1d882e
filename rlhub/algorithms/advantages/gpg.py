"""Group policy gradient (Chu et al. 2025, arXiv 2504.02546)."""

from __future__ import annotations

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, SampleInputs, SampleOutputs
from rlhub.algorithms.statistics import group_statistics


def gpg(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
    """Returns A_i = alpha (R_i - mean_g) on every model token of sample i; alpha = B / (B - M) makes up for groups without a
    gradient.

    B: samples with model tokens; M: those among them whose group has no spread, being of equal rewards or of one sample.
    Where no group has spread, all is 0.  Elsewhere alpha is B over the number of samples with a non-zero reward, which
    depends on where the scorer puts its zero.
    """
    return inputs.broadcast(per_sample(inputs.samples(), knobs))


def per_sample(inputs: SampleInputs, knobs: None) -> SampleOutputs:
    """Returns A_i of each sample, (batch,)."""
    stats = group_statistics(inputs.rewards, inputs.group)
    present = inputs.num_tokens > 0
    total, useful = int(present.sum().item()), int((present & ~stats.flat).sum().item())
    alpha = total / useful if useful else 0.0
    return SampleOutputs(advantages=alpha * stats.centred(inputs.rewards), metrics=stats.metrics() | {"groups/gpg_alpha": alpha})
