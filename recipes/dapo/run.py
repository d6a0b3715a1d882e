"""DAPO (Yu et al. 2025, arXiv 2503.14476) on the quickstart's task: clip-higher, dynamic sampling, token-level loss, overlong
reward shaping.

    python recipes/dapo/run.py [options and key=value settings of recipes/arithmetic/run.py]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages

SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "reward_model.reward_manager=dapo",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len=1",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
)

if __name__ == "__main__":
    sys.exit(stages.quickstart_with("dapo", SETTINGS))
