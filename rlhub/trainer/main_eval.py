"""Evaluate a model on data.val_files: `python -m rlhub.trainer.main_eval data.val_files=... actor_rollout_ref.model.path=...`"""

from __future__ import annotations

import logging
import sys
from collections.abc import Set as AbstractSet
from contextlib import ExitStack

from rlhub.config.cli import run as run_cli
from rlhub.config.schema import to_dict
from rlhub.config.sections.ppo import PPOConfig
from rlhub.trainer.preflight.checks import check, check_login
from rlhub.trainer.preflight.rollout import check_weights_read

logger = logging.getLogger(__name__)

REQUIRED = ("data.val_files", "actor_rollout_ref.model.path")
DESCRIPTION = (
    "Sample answers to data.val_files (actor_rollout_ref.rollout.val_kwargs says how), score them, and report pass@1 and "
    "pass@k, over all rows and per data source; with env.name, let the policy act in simulators, and report its success over "
    "env.val_scenes initial states.  The sampled answers and metrics.jsonl are left in the run folder."
)


def main(config: PPOConfig) -> int:
    """Runs one validation, records it as step 0 of a run folder of its own, and returns the exit status."""
    from rlhub.trainer.ppo.trainer import build_evaluation
    from rlhub.trainer.preflight.weights import check_model_weights
    from rlhub.trainer.run import Run

    config.trainer.resume_mode = "disable"
    check_model_weights(config)
    with ExitStack() as stack:
        run = stack.enter_context(Run(config.trainer, to_dict(config), 0))
        validator = build_evaluation(config, run, stack)
        run.start()
        run.begin_step(0)
        report = validator()
        run.log_generations(0, report.samples)
        run.log(0, report.metrics)
        for name, value in report.metrics.items():
            logger.info("%s: %.4f", name, value)
        logger.info("samples and metrics: %s", run.folder.path)
        return run.signals.exit_code


def check_evaluation(config: PPOConfig, set_keys: AbstractSet[str] = frozenset()) -> list[str]:
    """Checks as `check` does, and whether the engine can generate from the model's files."""
    return [*check(config, set_keys), *check_weights_read(config)]


if __name__ == "__main__":
    sys.exit(
        run_cli(
            PPOConfig, "eval", main, description=DESCRIPTION, preflight=check_evaluation, ready=check_login, required=REQUIRED
        )
    )
