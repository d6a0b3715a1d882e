"""Controls of the recipe: what must not learn, or must fail, if the policy really learns from its pictures and its reward.

    python recipes/embodied_reach/run.py --name black env.name=recipes/embodied_reach/controls.py:BlackPictures
    python recipes/embodied_reach/run.py --name shuffled trainer.plugins=[recipes.embodied_reach.controls] \
        algorithm.adv_estimator=shuffled_chunk_gae

main_eval with env.name=recipes/embodied_reach/controls.py:OtherColor tells a trained policy the colour of the other target.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from rlhub.algorithms.advantages.gae import ChunkGAEKnobs, chunk_gae
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, on_last_token
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.envs.vector.reach_color import COLORS, ReachColor


class BlackPictures(ReachColor):
    """Shows nothing."""

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        super().observe(images, state)
        images[:] = 0


class OtherColor(ReachColor):
    """Tells the policy the colour of the target that it must not touch."""

    def reset(self, seed: int, initial: int | None) -> str:
        named = super().reset(seed, initial).split()[-1]
        return f"touch {COLORS[1 - COLORS.index(named)]}"


@ADVANTAGE_ESTIMATORS.register(
    "shuffled_chunk_gae", requires={"values", "episodes", "next_values", "gather"}, knobs=ChunkGAEKnobs
)
def shuffled_chunk_gae(inputs: AdvantageInputs, knobs: ChunkGAEKnobs) -> AdvantageOutputs:
    """Returns chunk_gae's advantages of rewards that are dealt out at random among a rank's calls."""
    rewards, mask = inputs.outcome_rewards(), inputs.response_mask
    rows = mask.any(1).nonzero().squeeze(1)
    rewards[rows] = rewards[rows[torch.randperm(len(rows))]]
    return chunk_gae(dataclasses.replace(inputs, token_level_rewards=on_last_token(rewards, mask)), knobs)
