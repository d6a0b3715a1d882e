"""Export a checkpoint as a Hugging Face model: `python -m rlhub.trainer.main_export checkpoint=<run> output=<folder> --verify`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlhub.config.cli import run as run_cli
from rlhub.config.sections.export import ExportConfig, problems

DESCRIPTION = (
    "Write a checkpoint's model as a Hugging Face folder (safetensors, configuration, tokenizer, chat template, generation "
    "settings), read from its shards: those of any number of ranks of any training engine, also where the checkpoint's own "
    "huggingface folder is missing or damaged, with adapters merged.  --verify (the same as verify=true) then loads the folder "
    "with plain transformers and compares it with the checkpoint; the exit status is 1 where they differ.  Example: "
    "checkpoint=checkpoints/my_run step=best output=my_model dtype=bf16 --verify"
)


def main(config: ExportConfig) -> int:
    """Exports the checkpoint's model, verifies the export if config.verify, and returns the exit status."""
    from rlhub.trainer.export import export

    return export(config)


def command(argv: Sequence[str]) -> int:
    """Runs the command line; its one flag `--verify` stands for the setting verify=true."""
    settings = ["verify=true" if argument == "--verify" else argument for argument in argv]
    return run_cli(ExportConfig, "export", main, description=DESCRIPTION, preflight=problems, required=(), argv=settings)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
