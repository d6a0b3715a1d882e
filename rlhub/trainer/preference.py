"""DPO and reward models: preference pairs for the SupervisedTrainer."""

from __future__ import annotations

from functools import partial

from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.data.preference import PreferenceDataset
from rlhub.trainer.supervised import SupervisedData, builder, read_data
from rlhub.workers.supervised import DPOWorker, RewardTrainingWorker

COLUMNS = ("input_ids", "attention_mask", "response_mask")

build_dpo_trainer = builder(DPOWorker)
build_rm_trainer = builder(RewardTrainingWorker)


def build_dpo_data(config: DPOConfig) -> SupervisedData:
    """Read the files; DataError names file, row and column of what is unusable."""
    return read_data(config, partial(PreferenceDataset, config.data), COLUMNS)


def build_rm_data(config: RMConfig) -> SupervisedData:
    """As `build_dpo_data`, with the margins if there are any."""
    columns = COLUMNS if config.margin_key is None else (*COLUMNS, "margin")
    return read_data(config, partial(PreferenceDataset, config.data, margin_key=config.margin_key), columns)
