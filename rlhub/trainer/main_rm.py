"""Train a reward model: `python -m rlhub.trainer.main_rm data.train_files=... model.path=...`"""

from __future__ import annotations

import sys

from rlhub.config.cli import run as run_cli
from rlhub.config.sections.preference import RMConfig
from rlhub.trainer.preflight.checks import check, check_login

DESCRIPTION = (
    "Training a reward model on pairs of a chosen and a rejected answer (Bradley-Terry): a scalar head on a language model or "
    "on a reward model, saved as a sequence classifier with one label."
)


def main(config: RMConfig) -> int:
    """Builds the data and the trainer, trains, and returns the exit status (128 + signal when stopped by one)."""
    from rlhub.trainer.supervised import build_data, build_trainer
    from rlhub.trainer.training import train

    return train(config, build_data(config), build_trainer)


if __name__ == "__main__":
    sys.exit(run_cli(RMConfig, "rm", main, description=DESCRIPTION, preflight=check, ready=check_login))
