"""A driver of one's own that adds and removes replicas of the rollout service between training steps.

    python recipes/async_grpo/replicas.py --add 3 --remove 6 data.train_files=... [settings of main_ppo]

It trains as main_ppo does.  Before step 3 it adds a replica, and waits until that one serves; before step 6 it removes it again.
The settings need rollout.mode=async and a pool with room, for example:

    actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.min_replicas=1
    trainer.pools.generation.n_gpus_per_node=2 trainer.placement.rollout=generation
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlhub.config.cli import run as run_cli
from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import DataProto
from rlhub.trainer.ppo.step import StepParts
from rlhub.trainer.ppo.stream_source import StreamSource
from rlhub.trainer.ppo.trainer import PPOData, PPOTrainer, build_data, build_trainer
from rlhub.trainer.preflight.checks import check_training
from rlhub.trainer.run import Run
from rlhub.trainer.training import train


class WithReplicas:
    """A training step, before which replicas come or go."""

    def __init__(self, step: StepParts, add: int, remove: int) -> None:
        self.step, self.add, self.remove = step, add, remove
        assert isinstance(step.source, StreamSource) and step.source.service is not None, "rollout.mode=async has replicas"
        self.source, self.service = step.source, step.source.service
        self.kl_controller = self.step.kl_controller
        self.added = ""

    def __call__(self, step: int, prompts: Iterator[DataProto]) -> dict[str, Any]:
        if step == self.add:
            self.added = self.service.add(f"before step {step}")
        if step == self.remove and self.added:
            self.service.remove(self.added, f"before step {step}")
        return self.step(step, prompts)


def main() -> int:
    """Trains; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=int, default=3, help="step before which a replica is added")
    parser.add_argument("--remove", type=int, default=6, help="step before which it is removed")
    given, settings = parser.parse_known_args()

    def build(config: PPOConfig, data: PPOData, run: Run, stack: ExitStack) -> PPOTrainer:
        trainer = build_trainer(config, data, run, stack)
        trainer.train_step = WithReplicas(trainer.train_step, given.add, given.remove)  # type: ignore[assignment]  # has its interface
        return trainer

    def fit(config: PPOConfig) -> int:
        return train(config, build_data(config), build)

    return run_cli(PPOConfig, "ppo", fit, description=str(__doc__), preflight=check_training, argv=settings)


if __name__ == "__main__":
    sys.exit(main())
