"""GSPO (Zheng et al. 2025, arXiv 2507.18071) on the quickstart's task: the ratio of a whole response is clipped.

python recipes/gspo/run.py [options and key=value settings of recipes/arithmetic/run.py]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages

SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)

if __name__ == "__main__":
    sys.exit(stages.quickstart_with("gspo", SETTINGS))
