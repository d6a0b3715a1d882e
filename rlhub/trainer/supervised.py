"""Supervised training: one optimizer step a batch, with the same run folder, checkpoints and resume as RL.

SupervisedTrainer is the same for demonstrations (SFT), preference pairs (DPO) and reward models; the worker has the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.vla import vla_of
from rlhub.data.episodes import FRAME, EpisodeDataset
from rlhub.data.order import IndexedData, ResumableLoader
from rlhub.data.supervised import PreferenceDataset, SFTDataset
from rlhub.models.tokenizer import load_tokenizer, read_vocabulary
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, Worker, WorkerGroup
from rlhub.trainer.launch import launch_workers
from rlhub.trainer.ppo.metrics import mean_metrics
from rlhub.trainer.run import Run
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import DPOWorker, RewardTrainingWorker, SFTWorker

SupervisedConfig = SFTConfig | DPOConfig | RMConfig
C = TypeVar("C", SFTConfig, DPOConfig, RMConfig)
COLUMNS = ("input_ids", "attention_mask", "response_mask")


@dataclass(slots=True, kw_only=True)
class SupervisedTrainer:
    """Trains one model on batches of a data set, and validates and saves it when that is due.

    model: a worker group with `train_step(batch)` (metrics of one optimizer step), `evaluate(batch)` (sums and their `count`),
    `save_checkpoint` and `load_checkpoint`.  columns: the columns of a batch that the workers read.
    """

    config: TrainerConfig
    run: Run
    loader: ResumableLoader
    val_batches: Sequence[DataProto]
    model: WorkerGroup
    columns: list[str]
    total_steps: int

    def fit(self) -> int:
        """Trains to `total_steps`, or until a stop is requested, and returns the last step taken.

        Each step is one optimizer step over data.train_batch_size rows.
        """
        step = self.restore()
        if step == 0 and self.val_batches and self.config.val_before_train:
            self.run.begin_step(0)
            self.run.log(0, self.validate())
        batches = self.loader.endless()
        stopping = self.run.stop_requested
        while step < self.total_steps and not stopping:
            step += 1
            self.run.begin_step(step)
            metrics = mean_metrics(self.model.train_step(self._read(next(batches))).meta_info["metrics"])
            last = step == self.total_steps
            if self.val_batches and self.run.due(self.config.test_freq, step, last=last):
                metrics |= self.validate()
            stopping = self.run.stop_requested  # read once a step, so that the step after which the run stops is saved
            self.run.end_step(step, metrics, save=self.save, state=self.state, last=last or stopping)
        return step

    def validate(self) -> dict[str, float]:
        """Returns the metrics val/...: each sum of the workers divided by the sum of their `count`."""
        totals: dict[str, float] = {}
        for batch in self.val_batches:
            for name, value in mean_metrics(self.model.evaluate(self._read(batch)).meta_info["metrics"]).items():
                totals[name] = totals.get(name, 0.0) + value
        count = max(totals.pop("count"), 1.0)
        return {f"val/{name}": total / count for name, total in totals.items()}

    def _read(self, batch: DataProto) -> DataProto:
        return batch.select(batch_keys=self.columns)

    def save(self, folder: Path) -> list[FileEntry]:
        """Lets every rank write its part below `folder`/model, and returns the files."""
        return [entry for rank in self.model.save_checkpoint(str(folder / "model")) for entry in rank]

    def state(self) -> dict[str, Any]:
        """Returns the driver's part of a checkpoint: the position in the data."""
        return {"loader": self.loader.state()}

    def restore(self) -> int:
        """Loads the checkpoint from which the run resumes, and returns its step; 0 for a new run."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return 0
        self.model.load_checkpoint(str(checkpoint.path / "model"))
        self.loader.load_state(checkpoint.state["loader"])
        return checkpoint.step


@dataclass(slots=True, kw_only=True)
class SupervisedData:
    """The driver's data.  columns: the columns of a batch that the workers read."""

    loader: ResumableLoader
    val_batches: Sequence[DataProto]
    columns: list[str]
    total_steps: int


def read_data(config: SupervisedConfig, read: Callable[..., IndexedData], columns: Sequence[str]) -> SupervisedData:
    """Reads the files of a job.  Raises DataError, which names file, row and column, for a row that cannot be used.

    read: called as (files, tokenizer, *, vocab_size), returns the data set.
    """
    data = config.data
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    assert data.train_files is not None and config.model.path is not None, "checked when the configuration is loaded"
    read = partial(read, vocab_size=read_vocabulary(config.model, tokenizer).size)
    dataset = read(data.train_files, tokenizer)
    loader = ResumableLoader(dataset, data.train_batch_size, seed=data.seed, shuffle=data.shuffle, drop_last=True)
    val_batches: list[DataProto] = []
    if data.val_files:
        validation = read(data.val_files, tokenizer)
        val_batches = list(ResumableLoader(validation, data.train_batch_size, shuffle=False, drop_last=False))
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    return SupervisedData(loader=loader, val_batches=val_batches, columns=list(columns), total_steps=total_steps)


def builder(worker: type[Worker]) -> Callable[[C, SupervisedData, Run, ExitStack], SupervisedTrainer]:
    """Returns a function that starts the workers of a job and builds its trainer.

    worker: constructed with (configuration, runtime).  The function puts what must be ended on its exit stack.
    """

    def build(config: C, data: SupervisedData, run: Run, stack: ExitStack) -> SupervisedTrainer:
        config.optim.total_training_steps = data.total_steps
        runtime = WorkerRuntime(
            device=config.trainer.device,
            seed=config.trainer.seed,
            max_prompt_length=config.data.max_length,
            max_response_length=config.data.max_length,
            deadline_s=config.trainer.deadline_s.update,
        )
        roles = {"model": ClassWithInitArgs(worker, config, runtime)}
        launched = stack.enter_context(launch_workers(roles, config.trainer, run=run))
        return SupervisedTrainer(
            config=config.trainer,
            run=run,
            loader=data.loader,
            val_batches=data.val_batches,
            model=launched.groups["model"],
            columns=data.columns,
            total_steps=data.total_steps,
        )

    return build


def build_sft_data(config: SFTConfig) -> SupervisedData:
    """Reads demonstrations, of a vision-language-action policy in recorded episodes."""
    vla = vla_of(config.model)
    if vla is not None:
        return read_data(config, partial(EpisodeDataset, vla=vla), (*COLUMNS, FRAME))
    return read_data(config, partial(SFTDataset, config.data), COLUMNS)


def build_dpo_data(config: DPOConfig) -> SupervisedData:
    """Reads preference pairs."""
    return read_data(config, partial(PreferenceDataset, config.data), COLUMNS)


def build_rm_data(config: RMConfig) -> SupervisedData:
    """Reads preference pairs, with the margins if there are any."""
    columns = COLUMNS if config.margin_key is None else (*COLUMNS, "margin")
    return read_data(config, partial(PreferenceDataset, config.data, margin_key=config.margin_key), columns)


build_sft_trainer = builder(SFTWorker)
build_dpo_trainer = builder(DPOWorker)
build_rm_trainer = builder(RewardTrainingWorker)
