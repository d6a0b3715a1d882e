"""CollectedSource: training batches out of files that another job writes while this one trains.

    collecting job: prompts -> episodes -> <rollout.trajectories_folder> -> this job: batches -> steps -> <rollout.weights_folder>

The collecting job takes its weights from the second folder.  It bounds staleness by itself, by the newest version it finds there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.prompts import PromptLoader
from rlhub.errors import WorkflowError
from rlhub.models.tokenizer import Vocabulary, read_vocabulary
from rlhub.protocol import DataProto
from rlhub.rollout_service.executor.batches import episode_metrics, to_batch
from rlhub.rollout_service.trajectory_files import TrajectoryReader
from rlhub.trainer.ppo.scoring import Scorer
from rlhub.utils.timing import PhaseTimer


@dataclass(slots=True, kw_only=True)
class CollectedSource:
    """See BatchSource.  The loader stays where it is.  write: the training ranks leave their weights in a folder."""

    config: PPOConfig
    loader: PromptLoader
    reader: TrajectoryReader
    scorer: Scorer
    vocabulary: Vocabulary
    write: Callable[[str, int], object]
    timers: PhaseTimer
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    policy_version: int = field(init=False, default=0)

    def start(self) -> None:
        """The first weights, which the collecting job waits for."""
        self._write(self.policy_version)

    def sample(self, prompts: Iterator[DataProto], step: int) -> DataProto:
        """The next groups that were collected.  WorkflowError where the collecting job has ended."""
        wanted = self.config.data.train_batch_size
        with self.timers.measure("wait_for_episodes"):
            groups = self.reader.next_groups(wanted, self.config.trainer.deadline_s.generate, step=step)
        if len(groups) < wanted:
            raise WorkflowError(
                f"step {step} needs {wanted} groups; only {len(groups)} came, and the job that collects has ended"
            )
        batch = to_batch(groups, pad_id=self.vocabulary.pad_id, vocab_size=self.vocabulary.size)
        batch.meta_info["policy_version"] = self.policy_version
        self.metrics = self.reader.metrics() | episode_metrics(groups) | self.scorer(batch)
        return batch

    def publish(self, version: int) -> None:
        self.policy_version = version
        self.reader.set_version(version)
        self._write(version)

    def _write(self, version: int) -> None:
        folder = self.config.actor_rollout_ref.rollout.weights_folder
        assert folder is not None, "checked before start"
        with self.timers.measure("write_weights"):
            self.write(folder, version)

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
    config: PPOConfig,
    loader: PromptLoader,
    tokenizer: Any,
    scorer: Scorer,
    write: Callable[[str, int], object],
    timers: PhaseTimer,
) -> CollectedSource:
    """The source of a configuration that config.asynchronous has passed."""
    rollout = config.actor_rollout_ref.rollout
    assert rollout.trajectories_folder is not None
    return CollectedSource(
        config=config,
        loader=loader,
        reader=TrajectoryReader(rollout.trajectories_folder),
        scorer=scorer,
        vocabulary=read_vocabulary(config.actor_rollout_ref.model, tokenizer),
        write=write,
        timers=timers,
    )
