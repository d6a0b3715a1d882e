"""Sources of training batches that no engine of this job generates.

    collecting job: prompts -> episodes -> <rollout.trajectories_folder> -> OfflineSource: steps -> <rollout.weights_folder>
    an earlier run: RecordingSource -> <run folder>/batches -> ReplaySource: the same steps again

The collecting job takes its weights from the weights folder, and bounds staleness by itself, by the newest version it finds
there.  A recorded batch is all that the step reads after scoring, before it deals the rows to the ranks; so the same
configuration and seed give the same weights, bit for bit on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhub.agents.remote.holders import by_home
from rlhub.agents.remote.trajectory_store import WIDE, RowRequest, trajectories_of, wide_names
from rlhub.agents.trajectory import Trajectory, TrajectoryRef, rows_of, with_rows
from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.order import ResumableLoader
from rlhub.errors import DataError, WorkflowError
from rlhub.models.tokenizer import Vocabulary, read_vocabulary
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.protocol.exchange import FileRows, RowSource
from rlhub.protocol.layout import ColumnInfo
from rlhub.protocol.sequences import with_padding
from rlhub.rollout_service.executor.batches import episode_metrics, prompt_columns, row_columns, score_rows, to_batch
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.rollout_service.trajectory_files import TrajectoryReader
from rlhub.rollout_service.trajectory_rows import CollectedRows
from rlhub.single_controller import WorkerGroup
from rlhub.trainer.ppo.dealing import TRAINING_MESH, Dealing
from rlhub.trainer.ppo.scoring import Samples
from rlhub.trainer.ppo.step import SampleSource
from rlhub.utils.atomic import TEMPORARY_SUFFIX
from rlhub.utils.timing import PhaseTimer

RECORDINGS = "batches"
"""Folder of the recorded batches in the run folder."""
PARTS, COLUMNS = "parts", "columns"
"""Meta entries of a recorded batch: the files of its columns of tokens, and what these are."""


@dataclass(slots=True, kw_only=True)
class OfflineSource:
    """Is the SampleSource of training batches out of files that another job writes while this one trains.

    The loader stays where it is.  write: the training ranks leave their weights in a folder, which the collecting job waits for.
    ranks: those that train, which read the tokens from the files; None: this process reads them.
    """

    config: PPOConfig
    loader: ResumableLoader
    reader: TrajectoryReader
    vocabulary: Vocabulary
    write: Callable[[str, int], object]
    timers: PhaseTimer
    ranks: WorkerGroup | None = None
    policy_version: int = field(init=False, default=0)
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    _published: int | None = field(init=False, default=None)

    def publish(self) -> None:
        """Writes the weights; they are in the folder when this returns."""
        folder = self.config.actor_rollout_ref.rollout.weights_folder
        assert folder is not None, "checked before start"
        if self._published != self.policy_version:
            with self.timers.measure("write_weights"):
                self.write(folder, self.policy_version)
            self._published = self.policy_version

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        """Returns the next groups that were collected.  Raises WorkflowError where the collecting job has ended."""
        wanted = self.config.data.train_batch_size
        with self.timers.measure("wait_for_episodes"):
            groups = self.reader.next_groups(wanted, self.config.trainer.deadline_s.generate, step=step)
        if len(groups) < wanted:
            raise WorkflowError(
                f"step {step} needs {wanted} groups; only {len(groups)} came, and the job that collects has ended"
            )
        batch = self._batch(groups) if self.ranks is None else self._by_reference(groups, self.ranks, step)
        batch.meta_info["policy_version"] = self.policy_version
        self.metrics = self.reader.metrics() | episode_metrics(groups)
        return Samples(batch=batch)

    def _by_reference(self, groups: Sequence[Group], ranks: WorkerGroup, step: int) -> Batch:
        """Lets the ranks read the tokens from the files, equal parts of the rows: they are scored before they are dealt."""
        rows = [row for group in groups for row in group.rows if isinstance(row, TrajectoryRef)]
        names = wide_names(rows)
        small = DataProto.from_dict(row_columns(groups) | score_rows(groups), prompt_columns(groups))
        columns = {name: ColumnInfo(WIDE[name], (), ragged=True) for name in names}

        def sources(chosen: np.ndarray) -> list[tuple[RowSource, np.ndarray]]:
            part = [rows[row] for row in chosen.tolist()]
            return [(self._source(part, places, names), np.array(places)) for places in by_home(part).values()]

        return ranks.collect(small, columns, sources, TRAINING_MESH, f"collected-{step}")

    def _source(self, rows: Sequence[TrajectoryRef], places: Sequence[int], names: tuple[str, ...]) -> CollectedRows:
        """Returns what reads the rows at these places, which are all in one file."""
        request = RowRequest.of([rows[place] for place in places], names)
        return CollectedRows(self.reader.url, rows[places[0]].home, request, self.vocabulary.size)

    def _batch(self, groups: Sequence[Group]) -> DataProto:
        """Reads the tokens of all rows here."""
        rows = [row for group in groups for row in group.rows if isinstance(row, TrajectoryRef)]
        found: dict[int, Trajectory] = {}
        for places in by_home(rows).values():
            chosen = [rows[place] for place in places]
            data = self._source(rows, places, wide_names(chosen)).read()
            found |= zip(places, trajectories_of(chosen, data), strict=True)
        ordered = iter(found[place] for place in range(len(rows)))
        whole = [
            replace(group, trajectories=[with_rows(one, [next(ordered) for _ in rows_of(one)]) for one in group.trajectories])
            for group in groups
        ]
        return to_batch(whole, pad_id=self.vocabulary.pad_id, vocab_size=self.vocabulary.size)

    def select(self, samples: Samples) -> Batch:
        """Returns all samples."""
        return samples.batch

    def trained(self, step: int) -> None:
        self.policy_version = step
        self.reader.set_version(step)

    def save(self, folder: Path) -> list[FileEntry]:
        return []

    def state(self) -> dict[str, Any]:
        return {"loader": self.loader.state(), "policy_version": self.policy_version, "collected": self.reader.state()}

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        self.loader.load_state(state["loader"])
        self.policy_version = state["policy_version"]
        if "collected" in state:
            self.reader.load_state(state["collected"])


def build_collected(
    config: PPOConfig, loader: ResumableLoader, tokenizer: Any, actor: WorkerGroup, timers: PhaseTimer
) -> OfflineSource:
    """Returns the source of a configuration that config.rules.asynchronous has passed.  actor: the ranks that train."""
    rollout = config.actor_rollout_ref.rollout
    assert rollout.trajectories_folder is not None
    return OfflineSource(
        config=config,
        loader=loader,
        reader=TrajectoryReader(rollout.trajectories_folder),
        vocabulary=read_vocabulary(config.actor_rollout_ref.model, tokenizer),
        write=partial(actor.write_weights, full_every=rollout.weights_full_every),
        timers=timers,
        ranks=actor if config.trainer.batches == "reference" else None,
    )


def batch_file(folder: Path, step: int) -> Path:
    """Returns the file of the batch of that training step."""
    return folder / f"step-{step:06d}.safetensors"


def record(batch: Batch, path: Path) -> None:
    """Writes a batch to the file.  By reference the ranks that have the rows write their columns to files beside it."""
    small = batch.small if isinstance(batch, BatchRef) else batch
    small = small.select(non_tensor_batch_keys=[])
    if isinstance(batch, BatchRef):
        assert isinstance(batch.group, WorkerGroup), "a source's batch is with its ranks"
        parts = batch.group.save_rows(batch, path.with_name(path.stem.replace("step", "rows")))
        small.meta_info[PARTS] = [[part.name, rows.tolist()] for part, rows in parts]
        columns = {
            name: (str(info.dtype).removeprefix("torch."), info.shape, info.ragged) for name, info in batch.columns.items()
        }
        small.meta_info[COLUMNS] = columns
    aside = path.with_name(path.name + TEMPORARY_SUFFIX)
    small.save_to_disk(aside)
    aside.rename(path)


@dataclass(slots=True)
class Recorded:
    """A recorded batch.  small: its columns of one number a row, or where it is in one file all of them.  parts: the files of
    the others, each with the numbers of its rows.  columns: the others."""

    small: DataProto
    parts: list[tuple[Path, np.ndarray]]
    columns: dict[str, ColumnInfo]

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Reads the file of a batch, and of its parts nothing."""
        small = DataProto.load_from_disk(path)
        parts, columns = small.meta_info.pop(PARTS, []), small.meta_info.pop(COLUMNS, {})
        infos = {name: ColumnInfo(getattr(torch, dtype), shape, ragged) for name, (dtype, shape, ragged) in columns.items()}
        return cls(small, [(path.with_name(name), np.array(rows, dtype=np.int64)) for name, rows in parts], infos)

    def whole(self) -> DataProto:
        """Returns the batch with all columns, as workers read them."""
        if not self.parts:
            return self.small
        rows = DataProto.concat([DataProto.load_from_disk(path) for path, _ in self.parts])
        order = np.argsort(np.concatenate([rows for _, rows in self.parts]), kind="stable")
        return DataProto.from_dict(with_padding(rows.select_idxs(order).tensors())).union(self.small)

    def on(self, ranks: WorkerGroup, dealing: Dealing, step: int) -> Batch:
        """Returns the batch of a step by reference, whose columns the ranks that will train them read from the files."""
        if not self.parts:
            return self.small
        file_of = np.empty(len(self.small), dtype=np.int64)
        place = np.empty(len(self.small), dtype=np.int64)
        for number, (_, rows) in enumerate(self.parts):
            file_of[rows], place[rows] = number, np.arange(len(rows))

        def sources(chosen: np.ndarray) -> list[tuple[RowSource, np.ndarray]]:
            hits = [np.flatnonzero(file_of[chosen] == number) for number in range(len(self.parts))]
            pairs = zip(self.parts, hits, strict=True)
            return [(FileRows(path.absolute(), place[chosen[hit]]), hit) for (path, _), hit in pairs if len(hit)]

        return dealing.collect(ranks, self.small, self.columns, sources, f"replay-{step}", step)


@dataclass(slots=True)
class RecordingSource:
    """Wraps another source and writes its training batches, scored, to the folder."""

    source: SampleSource
    folder: Path
    _step: int = field(init=False, default=0)

    @property
    def policy_version(self) -> int:
        return self.source.policy_version

    @property
    def metrics(self) -> dict[str, float]:
        return self.source.metrics

    def publish(self) -> None:
        self.source.publish()

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        self._step = step
        return self.source.sample(prompts, step)

    def select(self, samples: Samples) -> Batch | None:
        """Returns what the other source does, and records it with its scores."""
        samples.scored()
        batch = self.source.select(samples)
        if batch is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            record(batch, batch_file(self.folder, self._step))
        return batch

    def trained(self, step: int) -> None:
        self.source.trained(step)

    def save(self, folder: Path) -> list[FileEntry]:
        return self.source.save(folder)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        self.source.load_state(state, folder)


@dataclass(slots=True)
class ReplaySource:
    """Is the SampleSource of the recorded batches of a folder.  No prompts are drawn: the loader stays where it is.

    ranks: those that train, which read the columns of tokens, as the dealing deals them; None: this process reads them.
    """

    folder: Path
    loader: ResumableLoader
    ranks: WorkerGroup | None = None
    dealing: Dealing | None = None
    policy_version: int = field(init=False, default=0)
    metrics: dict[str, float] = field(init=False, default_factory=dict)

    def publish(self) -> None:
        """Does nothing: nothing generates."""

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        """Raises DataError where the recording ends."""
        path = batch_file(self.folder, step)
        if not path.is_file():
            raise DataError(
                f"trainer.replay_from={self.folder} has no batch of step {step} ({path.name}), but {num_recorded(self.folder)} "
                "others: set trainer.total_training_steps to as many, or name the folder of another run"
            )
        recorded = Recorded.read(path)
        if self.ranks is None:
            return Samples(batch=recorded.whole())
        assert self.dealing is not None, "built with both"
        return Samples(batch=recorded.on(self.ranks, self.dealing, step))

    def select(self, samples: Samples) -> Batch:
        """Returns the batch as it was recorded."""
        return samples.batch

    def trained(self, step: int) -> None:
        self.policy_version = step

    def save(self, folder: Path) -> list[FileEntry]:
        return []

    def state(self) -> dict[str, Any]:
        return {"loader": self.loader.state(), "policy_version": self.policy_version}

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        self.loader.load_state(state["loader"])
        self.policy_version = state["policy_version"]


def num_recorded(folder: Path) -> int:
    """Returns the number of batches in a folder."""
    return len(list(folder.glob("step-*.safetensors")))
