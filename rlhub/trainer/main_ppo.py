"""Train a policy by reinforcement learning.

python -m rlhub.trainer.main_ppo data.train_files=... actor_rollout_ref.model.path=...
"""

from __future__ import annotations

import sys

from rlhub.config.cli import run as run_cli
from rlhub.config.sections.ppo import PPOConfig
from rlhub.trainer.ppo.plan import describe
from rlhub.trainer.preflight.checks import check_login, check_training

DESCRIPTION = (
    "Reinforcement-learning post-training of a language model: prompts are answered by the rollout engine, scored by a "
    "reward function, and the policy is updated by the chosen estimator and loss."
)


def main(config: PPOConfig) -> int:
    """Trains, here or on every rank, and returns the exit status."""
    if config.trainer.controller == "single":
        return fit(config)
    from rlhub.trainer.launch import train_everywhere

    return train_everywhere(config, fit)


def fit(config: PPOConfig) -> int:
    """Builds the data and the trainer, trains, and returns the exit status (128 + signal when stopped by one)."""
    from rlhub.trainer.ppo.trainer import build_data, build_trainer
    from rlhub.trainer.training import train

    return train(config, build_data(config), build_trainer)


if __name__ == "__main__":
    sys.exit(run_cli(PPOConfig, "ppo", main, description=DESCRIPTION, preflight=check_training, ready=check_login, plan=describe))
