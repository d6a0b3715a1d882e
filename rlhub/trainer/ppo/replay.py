"""Training batches kept on disk, and trained on again without any engine that generates.

What is kept is all that the learner reads, scored, before it reorders anything; so the same configuration and seed give the
same weights, bit for bit on CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.data.prompts import PromptLoader
from rlhub.errors import DataError
from rlhub.protocol import DataProto
from rlhub.trainer.ppo.batch_source import BatchSource
from rlhub.trainer.ppo.scoring import Scorer
from rlhub.utils.atomic import TEMPORARY_SUFFIX

FOLDER = "batches"
"""In the run folder."""


def batch_file(folder: Path, step: int) -> Path:
    """Of the batch of that training step."""
    return folder / f"step-{step:06d}.safetensors"


@dataclass(slots=True)
class RecordingSource:
    """Another source, whose batches are written to the folder as they pass."""

    source: BatchSource
    scorer: Scorer
    folder: Path
    metrics: dict[str, float] = field(init=False, default_factory=dict)

    @property
    def policy_version(self) -> int:
        return self.source.policy_version

    def start(self) -> None:
        self.source.start()

    def sample(self, prompts: Iterator[DataProto], step: int) -> DataProto:
        batch = self.source.sample(prompts, step)
        self.metrics = self.source.metrics | self.scorer(batch)
        kept = batch.select(non_tensor_batch_keys=[])
        self.folder.mkdir(parents=True, exist_ok=True)
        path = batch_file(self.folder, step)
        aside = path.with_name(path.name + TEMPORARY_SUFFIX)
        kept.save_to_disk(aside)
        aside.rename(path)
        return batch

    def publish(self, version: int) -> None:
        self.source.publish(version)

    def save(self, folder: Path) -> list[FileEntry]:
        return self.source.save(folder)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        self.source.load_state(state, folder)


@dataclass(slots=True)
class ReplaySource:
    """The batches of a folder.  The prompts are not drawn: the loader stays where it is."""

    folder: Path
    loader: PromptLoader
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    policy_version: int = field(init=False, default=0)

    def start(self) -> None:
        """Nothing generates."""

    def sample(self, prompts: Iterator[DataProto], step: int) -> DataProto:
        """DataError where the recording ends."""
        path = batch_file(self.folder, step)
        if not path.is_file():
            raise DataError(
                f"trainer.replay_from={self.folder} has no batch of step {step} ({path.name}), but {num_recorded(self.folder)} "
                "others: set trainer.total_training_steps to as many, or name the folder of another run"
            )
        return DataProto.load_from_disk(path)

    def publish(self, version: int) -> None:
        self.policy_version = version

    def save(self, folder: Path) -> list[FileEntry]:
        return []

    def state(self) -> dict[str, Any]:
        return {"loader": self.loader.state(), "policy_version": self.policy_version}

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        self.loader.load_state(state["loader"])
        self.policy_version = state["policy_version"]


def num_recorded(folder: Path) -> int:
    """Batches in a folder."""
    return len(list(folder.glob("step-*.safetensors")))
