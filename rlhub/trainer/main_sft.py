"""Fine-tune on demonstrations: `python -m rlhub.trainer.main_sft data.train_files=... model.path=...`"""

from __future__ import annotations

import sys

from rlhub.config.cli import run as run_cli
from rlhub.config.sections.sft import SFTConfig
from rlhub.trainer.preflight.checks import check, check_login

DESCRIPTION = "Supervised fine-tuning on prompts with responses, or on messages: loss on the assistant's tokens only."


def main(config: SFTConfig) -> int:
    """Builds the data and the trainer, trains, and returns the exit status (128 + signal when stopped by one)."""
    from rlhub.trainer.supervised import build_data, build_trainer
    from rlhub.trainer.training import train

    return train(config, build_data(config), build_trainer)


if __name__ == "__main__":
    sys.exit(run_cli(SFTConfig, "sft", main, description=DESCRIPTION, preflight=check, ready=check_login))
