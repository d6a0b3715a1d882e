"""Supervised training: one optimizer step a batch, with the same run folder, checkpoints and resume as RL.

SupervisedTrainer is the same for demonstrations (SFT), preference pairs (DPO) and reward models: the step is a pipeline
(rlhub.pipeline.builtin), which names the worker that has the loss.  A user's pipeline may train further roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.config.rules.engines import ONLY_ROLE
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.vla import vla_of
from rlhub.data.episodes import EpisodeDataset
from rlhub.data.order import IndexedData, ResumableLoader
from rlhub.data.supervised import PreferenceDataset, SFTDataset
from rlhub.models.tokenizer import load_tokenizer, read_vocabulary
from rlhub.models.vision import image_reader
from rlhub.pipeline.builtin import DEMONSTRATIONS, PAIRS
from rlhub.pipeline.executor import Executor, RoleCalls, names_of
from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.load import supervised_graph
from rlhub.pipeline.show import to_svg
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, WorkerGroup
from rlhub.trainer.launch import launch_workers
from rlhub.trainer.ppo.metrics import graph_metrics, mean_metrics
from rlhub.trainer.run import Run
from rlhub.workers.memory_handover import WorkerRuntime

SupervisedConfig = SFTConfig | DPOConfig | RMConfig


@dataclass(slots=True, kw_only=True)
class SupervisedTrainer:
    """Trains on batches of a data set, validates the model, and saves all that the graph trains, when that is due.

    graph: one optimizer step over data.train_batch_size rows, which `next_batch` gives.  groups: the workers of its roles, with
    what it calls, and `save_checkpoint` and `load_checkpoint` of those that it trains.  ONLY_ROLE among them has
    `evaluate(batch)` (sums and their `count`).
    """

    config: SupervisedConfig
    run: Run
    loader: ResumableLoader
    val_batches: Sequence[DataProto]
    groups: Mapping[str, WorkerGroup]
    graph: TaskGraph
    total_steps: int

    def fit(self) -> int:
        """Trains to `total_steps`, or until a stop is requested, and returns the last step taken."""
        step = self.restore()
        if step == 0 and self.val_batches and self.config.trainer.val_before_train:
            self.run.begin_step(0)
            self.run.log(0, self.validate())
        batches = self.loader.endless()
        calls = RoleCalls({"next_batch": lambda _: next(batches)}, self.groups)
        train_step = Executor(self.graph, calls, self.config)
        stopping = self.run.stop_requested
        while step < self.total_steps and not stopping:
            step += 1
            self.run.begin_step(step)
            metrics = graph_metrics(train_step(step))
            last = step == self.total_steps
            if self.val_batches and self.run.due(self.config.trainer.test_freq, step, last=last):
                metrics |= self.validate()
            stopping = self.run.stop_requested  # read once a step, so that the step after which the run stops is saved
            self.run.end_step(step, metrics, save=self.save, state=self.state, last=last or stopping)
        return step

    def validate(self) -> dict[str, float]:
        """Returns the metrics val/...: each sum of the workers divided by the sum of their `count`."""
        totals: dict[str, float] = {}
        for batch in self.val_batches:
            for name, value in mean_metrics(self.groups[ONLY_ROLE].evaluate(batch).meta_info["metrics"]).items():
                totals[name] = totals.get(name, 0.0) + value
        count = max(totals.pop("count"), 1.0)
        return {f"val/{name}": total / count for name, total in totals.items()}

    def save(self, folder: Path) -> list[FileEntry]:
        """Lets every rank write its part of each trained role below `folder`/<role>, and returns the files."""
        saved = [self.groups[role].save_checkpoint(str(folder / role)) for role in self.trained]
        return [entry for ranks in saved for entries in ranks for entry in entries]

    @property
    def trained(self) -> list[str]:
        """Returns the roles whose weights the graph changes."""
        return sorted({node.trains for node in self.graph.nodes if node.trains})

    def state(self) -> dict[str, Any]:
        """Returns the driver's part of a checkpoint: the position in the data."""
        return {"loader": self.loader.state()}

    def restore(self) -> int:
        """Loads the checkpoint from which the run resumes, and returns its step; 0 for a new run."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return 0
        for role in self.trained:
            self.groups[role].load_checkpoint(str(checkpoint.path / role))
        self.loader.load_state(checkpoint.state["loader"])
        return checkpoint.step


@dataclass(slots=True, kw_only=True)
class SupervisedData:
    """The driver's data.  val_batches: with the columns that the workers read."""

    loader: ResumableLoader
    val_batches: Sequence[DataProto]
    total_steps: int


def build_data(config: SupervisedConfig) -> SupervisedData:
    """Reads the files of a job: demonstrations, or preference pairs, with the margins if there are any.

    Raises DataError, which names file, row and column, for a row that cannot be used.
    """
    data = config.data
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    assert data.train_files is not None and config.model.path is not None, "checked when the configuration is loaded"
    read = partial(_dataset(config), vocab_size=read_vocabulary(config.model, tokenizer).size)
    loader = ResumableLoader(
        read(data.train_files, tokenizer), data.train_batch_size, seed=data.seed, shuffle=data.shuffle, drop_last=True
    )
    val_batches: list[DataProto] = []
    if data.val_files:
        validation = read(data.val_files, tokenizer)
        val_batches = list(ResumableLoader(validation, data.train_batch_size, shuffle=False, drop_last=False))
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    return SupervisedData(loader=loader, val_batches=[*map(_model_inputs, val_batches)], total_steps=total_steps)


def _dataset(config: SupervisedConfig) -> Callable[..., IndexedData]:
    """Returns the class of the data set; it is called with (files, tokenizer, *, vocab_size)."""
    if isinstance(config, SFTConfig):
        vla = vla_of(config.model)
        if vla is not None:
            return partial(EpisodeDataset, vla=vla)
        return partial(SFTDataset, config.data, reader=image_reader(config.model))
    return partial(PreferenceDataset, config.data, margin_key=config.margin_key if isinstance(config, RMConfig) else None)


def _model_inputs(batch: DataProto) -> DataProto:
    columns = f"{DEMONSTRATIONS} {PAIRS}".replace("?", "").split()
    return batch.select(batch_keys=[name for name in columns if name in names_of(batch)])


def build_trainer(config: SupervisedConfig, data: SupervisedData, run: Run, stack: ExitStack) -> SupervisedTrainer:
    """Starts the workers that the job's pipeline names and builds its trainer.  What must be ended is put on `stack`."""
    graph = supervised_graph(config)
    config.optim.total_training_steps = data.total_steps
    runtime = WorkerRuntime(
        device=config.trainer.device,
        seed=config.trainer.seed,
        max_prompt_length=config.data.max_length,
        max_response_length=config.data.max_length,
        deadline_s=config.trainer.deadline_s.update,
    )
    roles = {role: ClassWithInitArgs(worker, config, runtime) for role, worker in graph.roles.items()}
    launched = stack.enter_context(launch_workers(roles, config.trainer, run=run))
    run.write_graph(to_svg(graph))
    return SupervisedTrainer(
        config=config,
        run=run,
        loader=data.loader,
        val_batches=data.val_batches,
        groups=launched.groups,
        graph=graph,
        total_steps=data.total_steps,
    )
