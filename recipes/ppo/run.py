"""PPO in full (Schulman et al. 2017, arXiv 1707.06347; Ziegler et al. 2019, arXiv 1909.08593) on the quickstart's task: a critic
with a clipped value loss that warms up first, and a KL in the reward whose weight follows a target.

    python recipes/ppo/run.py [options and key=value settings of recipes/arithmetic/run.py]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages

SETTINGS = (
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.95",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.01",
    "algorithm.kl_ctrl.target_kl=0.3",
    "data.train_batch_size=256",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=128",
    "critic.ppo_mini_batch_size=128",
    "critic.optim.lr=1e-3",
    "critic.cliprange_value=0.5",
    "trainer.critic_warmup=3",
)

if __name__ == "__main__":
    sys.exit(stages.quickstart_with("ppo", SETTINGS))
