"""ReMax (Li et al. 2024, arXiv 2310.10505) on the quickstart's task: the greedy response's reward is the baseline.

python recipes/remax/run.py [options and key=value settings of recipes/arithmetic/run.py]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages

SETTINGS = (
    "algorithm.adv_estimator=remax",
    "data.train_batch_size=256",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
)

if __name__ == "__main__":
    sys.exit(stages.quickstart_with("remax", SETTINGS))
