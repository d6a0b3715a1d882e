"""Group reward-decoupled normalization (arXiv 2601.05242): each reward component is compared within its group on its own
scale, so that a component with a large range does not drown the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.statistics import EpisodeRows, group_statistics, whiten


@dataclass(slots=True, kw_only=True)
class GDPOKnobs:
    """reward_weights: weight of each reward component by name; empty takes every component with weight 1.
    norm_adv_by_std_in_grpo: divide each by its group's standard deviation, as in the paper."""

    reward_weights: dict[str, float] = field(default_factory=dict)
    norm_adv_by_std_in_grpo: bool = True

    def __post_init__(self) -> None:
        for name, weight in self.reward_weights.items():
            if not isinstance(weight, int | float):
                raise ValueError(f"reward_weights.{name}={weight!r} is not a number")


def gdpo(inputs: AdvantageInputs, knobs: GDPOKnobs) -> AdvantageOutputs:
    """Returns A_i = sum_k w_k (r_{k,i} - mean_g r_k) / (std_g r_k + 1e-6) on every model token, whitened over the batch's model
    tokens.

    inputs: reward_components, by name (batch,).  token_level_rewards are not read, hence neither is a KL in the reward: use
    the KL loss.  A component is exactly 0 where it is equal within the group and in a group of one.
    """
    assert inputs.group is not None, "gdpo requires groups"
    assert inputs.reward_components is not None, "gdpo requires reward_components"
    weights = component_weights(list(inputs.reward_components), knobs.reward_weights)
    episodes = EpisodeRows(inputs.episodes)
    group = episodes.firsts(inputs.gather(inputs.group))
    every = inputs.gather.each({name: inputs.reward_components[name].to(torch.float64) for name in weights})
    components = {name: episodes.means(column) for name, column in every.items()}
    total = torch.zeros(len(group), dtype=torch.float64, device=group.device)
    metrics: dict[str, float] = {}
    for name, weight in weights.items():
        component = components[name]
        stats = group_statistics(component, group)
        total += weight * stats.normalized(component, divide=knobs.norm_adv_by_std_in_grpo)
        metrics |= stats.metrics() | {f"groups/all_equal/{name}": stats.metrics()["groups/all_equal"]}
    metrics.pop("groups/all_equal", None)  # each component has its own
    tokens = inputs.of_samples(total)
    advantages = whiten(tokens, inputs.response_mask, inputs.gather)
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics=metrics)


def component_weights(present: list[str], wanted: dict[str, float]) -> dict[str, float]:
    """Returns the weight of each component that counts; ValueError for a wanted one that the scorer did not give."""
    missing = [name for name in wanted if name not in present]
    if missing or not present:
        given = f"it returned {', '.join(sorted(present))}" if present else "it returned none"
        raise ValueError(
            f"gdpo needs reward components {', '.join(sorted(missing)) or 'by name'} of the reward function, but {given}; "
            "let compute_score return a dict with one number per component, and name these in algorithm.adv_kwargs.reward_weights"
        )
    return dict(wanted) if wanted else dict.fromkeys(present, 1.0)
