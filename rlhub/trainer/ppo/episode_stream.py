"""EpisodeStream: episodes of simulators that run while the policy trains on those before (rollout.mode=async with env.name).

    step s:  publish version s-1 -> take batch s from the rollout's ranks -> let them begin batch s+1 -> train batch s

A rank runs one batch at a time, with one version of the weights.  Its rows go to the training ranks before it begins the next
one, since a busy rank could not send them.  A batch is begun with weights that will be at most trainer.max_staleness versions old
when it trains: with 1 each step publishes; with more, publications wait until the bound requires them.  A smaller
trainer.pipeline_depth takes the place of that bound.  With 0 nothing runs ahead, and the schedule is that of rollout.mode=sync.

Each scene trains once: a checkpoint has the loader's position before the batch that is in work, which a resumed run begins again,
and prompts.jsonl has one line for each scene that has trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.order import ResumableLoader
from rlhub.errors import CheckpointError
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.rollout_service.executor.ledger import Phase
from rlhub.trainer.ppo.embodied import EpisodeGenerator
from rlhub.trainer.ppo.scoring import Samples
from rlhub.trainer.ppo.stream_source import PromptLog
from rlhub.trainer.ppo.sync_source import PROMPTS_IN_WORK, STREAMED
from rlhub.trainer.ppo.worker_groups import WorkerGroups


@dataclass(slots=True, kw_only=True, frozen=True)
class BatchInWork:
    """A batch that the rollout's ranks have begun.

    ordinals: of its scenes.  position: the loader's state before it.  version: of the policy that acts in it.  wait: returns its
    rows when its episodes are over.
    """

    ordinals: list[int]
    position: dict[str, Any]
    version: int
    wait: Callable[[], Batch]


@dataclass(slots=True, kw_only=True)
class EpisodeStream:
    """Is the SampleSource of this schedule.  last_step: the run's, after whose batch none is begun."""

    config: PPOConfig
    loader: ResumableLoader
    generator: EpisodeGenerator
    groups: WorkerGroups
    log: PromptLog
    last_step: int
    policy_version: int = field(init=False, default=0)
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    _published: int | None = field(init=False, default=None)
    _ahead: BatchInWork | None = field(init=False, default=None)
    _trains: list[int] = field(init=False, default_factory=list)

    def publish(self) -> None:
        """Sends the weights to the rollout's ranks, as far as the next batch that they begin needs them."""
        trains_at = self.policy_version + min(self._bound, 1)
        if self._published is None or trains_at - self._published > self._bound:
            self.refresh()

    def refresh(self) -> None:
        """Sends the actor's present weights, unless the ranks have them; waits until a batch in work is over."""
        if self._published != self.policy_version:
            self._episodes_over()
            self.groups.weights.sync(self.policy_version)
            self._published = self.policy_version

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        """Returns the batch that was begun a step ago, and lets the ranks begin the next one."""
        if self._ahead is None:
            if self.policy_version == 0:
                self.log.start()
            self._ahead = self._begin(prompts)
        batch, current, self._ahead = self._episodes_over(), self._ahead, None
        assert batch is not None, "begun above, if not a step ago"
        if self._bound:
            batch = self._moved(batch, step)
            batch.meta_info["policy_version"] = self.policy_version
            if step < self.last_step:
                self._ahead = self._begin(prompts)
        self._trains = current.ordinals
        self.log.take(step, current.ordinals)
        staleness = {"rollout/staleness": float(self.policy_version - current.version)}
        self.metrics = self.generator.metrics(batch) | staleness
        return Samples(batch=batch)

    @property
    def _bound(self) -> int:
        """Returns the largest staleness of a sample in versions of the policy."""
        trainer = self.config.trainer
        assert trainer.pipeline_depth is not None, "derive first"
        return min(trainer.max_staleness, trainer.pipeline_depth)

    def _episodes_over(self) -> Batch | None:
        """Returns the batch in work when its episodes are over; None where none is in work."""
        return None if self._ahead is None else self._ahead.wait()

    def _begin(self, scenes: Iterator[DataProto]) -> BatchInWork:
        assert self._published is not None, "the step publishes before it samples"
        position = self.loader.state()
        batch = next(scenes)
        return BatchInWork(
            ordinals=batch.batch["ordinal"].tolist(),
            position=position,
            version=self._published,
            wait=self.generator.submit(batch, self._published if self._bound else None),
        )

    def _moved(self, batch: Batch, step: int) -> Batch:
        """Returns the rows where they train: by reference, the rollout's ranks forget them."""
        if not isinstance(batch, BatchRef):
            return batch
        return self.groups.dealing(self.config).receive(self.groups.actor, batch, step)

    def select(self, samples: Samples) -> Batch:
        """Returns all samples."""
        return samples.batch

    def trained(self, step: int) -> None:
        """Takes notice that the step's scenes have trained."""
        self.policy_version = step
        self.log.ended(self._trains, Phase.TRAINED, "")

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes nothing: everything is in `state`."""
        return []

    def state(self) -> dict[str, Any]:
        """Returns the loader's state before the first scene that has not trained."""
        position = self.loader.state() if self._ahead is None else self._ahead.position
        return {"loader": position, "policy_version": self.policy_version}

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """Raises CheckpointError for what only a rollout service can go on with."""
        if STREAMED in state:
            raise CheckpointError(PROMPTS_IN_WORK)
        self.loader.load_state(state["loader"])
        self.policy_version = state["policy_version"]
        self.log.load_state({"next_ordinal": state["loader"]["consumed"], "open": []})
