"""Supervised fine-tuning: demonstrations for the SupervisedTrainer."""

from __future__ import annotations

from functools import partial

from rlhub.config.sections.sft import SFTConfig
from rlhub.data.sft import SFTDataset
from rlhub.trainer.supervised import SupervisedData, builder, read_data
from rlhub.workers.supervised import SFTWorker

COLUMNS = ("input_ids", "attention_mask", "response_mask")

build_trainer = builder(SFTWorker)


def build_data(config: SFTConfig) -> SupervisedData:
    """Read the files; DataError names file, row and column of what is unusable."""
    return read_data(config, partial(SFTDataset, config.data), COLUMNS)
