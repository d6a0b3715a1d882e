"""GRPO with an advantage, a reward and a metric of its own: what most recipes change.

python recipes/custom_advantage/run.py [options and key=value settings of recipes/arithmetic/run.py]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.algorithms.statistics import group_statistics

SETTINGS = (
    "trainer.plugins=[recipes.custom_advantage.run]",
    "algorithm.adv_estimator=weighted_grpo",
    "algorithm.adv_kwargs.blame=0.5",
    f"custom_reward_function.path={Path(__file__).with_name('reward.py')}",
)


@dataclass(slots=True, kw_only=True)
class WeightedKnobs:
    blame: float = 1.0
    """Factor of the advantages below 0; 1 is GRPO."""


@ADVANTAGE_ESTIMATORS.register("weighted_grpo", requires={"groups"}, knobs=WeightedKnobs)
def weighted_grpo(inputs: AdvantageInputs, knobs: WeightedKnobs) -> AdvantageOutputs:
    """A_i = (R_i - mean_g) / std_g, times `blame` where it is negative, on every model token of sample i."""
    assert inputs.group is not None, "requires groups"
    rewards = inputs.outcome_rewards()
    stats = group_statistics(rewards, inputs.group)
    gains = stats.normalized(rewards)
    advantages = inputs.on_tokens(torch.where(gains < 0, knobs.blame * gains, gains))
    metrics = stats.metrics() | {"advantages/blamed_share": (gains < 0).float().mean().item()}
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics=metrics)


if __name__ == "__main__":
    sys.exit(stages.quickstart_with("custom_advantage", SETTINGS))
