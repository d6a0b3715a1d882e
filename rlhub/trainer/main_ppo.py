"""Train a policy by reinforcement learning.

    python -m rlhub.trainer.main_ppo data.train_files=... actor_rollout_ref.model.path=...
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack

from rlhub.config.cli import run as run_cli
from rlhub.config.ppo import PPOConfig
from rlhub.config.schema import to_dict
from rlhub.trainer.preflight import check

logger = logging.getLogger(__name__)

DESCRIPTION = (
    "Reinforcement-learning post-training of a language model: prompts are answered by the rollout engine, scored by a "
    "reward function, and the policy is updated by the chosen estimator and loss."
)


def main(config: PPOConfig) -> int:
    """Build, fit; returns the exit status (128 + signal when stopped by one)."""
    from rlhub.trainer.ppo.build import build_data, build_trainer
    from rlhub.trainer.run import Run

    data = build_data(config)
    with ExitStack() as stack:
        run = stack.enter_context(Run(config.trainer, to_dict(config), data.total_steps))
        if run.already_finished:
            logger.warning(run.already_finished)
            return 0
        trainer = build_trainer(config, data, run, stack)
        run.start()
        last = trainer.fit()
        logger.info("step %d of %d done; run folder %s, report %s", last, data.total_steps, run.folder.path, run.folder.report)
        return run.signals.exit_code


if __name__ == "__main__":
    sys.exit(run_cli(PPOConfig, "ppo", main, description=DESCRIPTION, preflight=check))
