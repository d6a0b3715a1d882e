"""Train by direct preference optimization: `python -m rlhub.trainer.main_dpo data.train_files=... model.path=...`"""

from __future__ import annotations

import sys

from rlhub.config.cli import run as run_cli
from rlhub.config.sections.preference import DPOConfig
from rlhub.trainer.preflight.checks import check, check_login

DESCRIPTION = (
    "Direct preference optimization of a policy on pairs of a chosen and a rejected answer, with the model it starts from as "
    "the frozen reference."
)


def main(config: DPOConfig) -> int:
    """Builds the data and the trainer, trains, and returns the exit status (128 + signal when stopped by one)."""
    from rlhub.trainer.supervised import build_data, build_trainer
    from rlhub.trainer.training import train

    return train(config, build_data(config), build_trainer)


if __name__ == "__main__":
    sys.exit(run_cli(DPOConfig, "dpo", main, description=DESCRIPTION, preflight=check, ready=check_login))
