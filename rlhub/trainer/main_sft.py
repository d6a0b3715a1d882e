"""Supervised fine-tuning: `python -m rlhub.trainer.main_sft data.train_files=... model.path=...`"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack

from rlhub.config.cli import run as run_cli
from rlhub.config.schema import to_dict
from rlhub.config.sft import SFTConfig
from rlhub.trainer.preflight import check

logger = logging.getLogger(__name__)

DESCRIPTION = "Supervised fine-tuning on prompts with responses, or on messages: loss on the assistant's tokens only."


def main(config: SFTConfig) -> int:
    """Build, fit; returns the exit status (128 + signal when stopped by one)."""
    from rlhub.trainer.run import Run
    from rlhub.trainer.sft import build_data, build_trainer

    data = build_data(config)
    with ExitStack() as stack:
        run = stack.enter_context(Run(config.trainer, to_dict(config), data.total_steps))
        if run.already_finished:
            logger.warning(run.already_finished)
            return 0
        trainer = build_trainer(config, data, run, stack)
        run.start()
        last = trainer.fit()
        logger.info("step %d of %d done; run folder %s", last, data.total_steps, run.folder.path)
        return run.signals.exit_code


if __name__ == "__main__":
    sys.exit(run_cli(SFTConfig, "sft", main, description=DESCRIPTION, preflight=check))
