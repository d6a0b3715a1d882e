"""EpisodeStream: episodes of simulators that run while the policy trains on those before (rollout.mode=async with env.name).

    rollout's ranks:  batch s+1 -> batch s+2 -> ... as far as the bound permits, on a thread of their own
    step s:           publish version s-1, if no batch waits for it in vain -> take batch s -> train

A rank runs one batch at a time, with one version of the weights.  When its episodes are over, its rows are put where the training
ranks can get them, since a busy rank could not send them, and it begins the next batch.  A batch is begun only with weights that
will be at most trainer.max_staleness versions old when it trains, so at most so many batches are ahead; a smaller
trainer.pipeline_depth takes the place of that bound.  With 0 nothing runs ahead, and the schedule is that of rollout.mode=sync.

Weights go to a rank between two batches.  Training waits for that where it has no batch to train on anyway, or where the ranks
stand still because each further batch would be too old; else it goes on, and a later step publishes.

Each scene trains once: a checkpoint has the loader's position before the first batch that has not trained, from which a resumed
run begins again, and prompts.jsonl has one line for each scene that has trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition
from typing import Any

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.order import ResumableLoader
from rlhub.errors import CheckpointError
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.rollout_service.executor.ledger import Phase
from rlhub.tracking.spans import AHEAD
from rlhub.trainer.ppo.embodied import EpisodeGenerator
from rlhub.trainer.ppo.scoring import Samples
from rlhub.trainer.ppo.stream_source import PromptLog
from rlhub.trainer.ppo.sync_source import PROMPTS_IN_WORK, STREAMED
from rlhub.trainer.ppo.worker_groups import WorkerGroups
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.timing import PhaseTimer


@dataclass(slots=True, kw_only=True)
class BatchAhead:
    """A batch that the rollout's ranks have begun.

    step: the one that trains it.  ordinals: of its scenes.  position: the loader's state before it.  version: of the policy that
    acts in it.  rows: returns its rows on the ranks that train; None while its episodes run.
    """

    step: int
    ordinals: list[int]
    position: dict[str, Any]
    version: int
    rows: Callable[[], Batch] | None = None


@dataclass(slots=True, kw_only=True)
class EpisodeStream:
    """Is the SampleSource of this schedule.  last_step: the run's, after whose batch none is begun."""

    config: PPOConfig
    loader: ResumableLoader
    generator: EpisodeGenerator
    groups: WorkerGroups
    log: PromptLog
    timers: PhaseTimer
    last_step: int
    policy_version: int = field(init=False, default=0)
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    _published: int = field(init=False, default=-1)
    _ahead: deque[BatchAhead] = field(init=False, default_factory=deque)
    _trains: list[int] = field(init=False, default_factory=list)
    _thread: LoopThread | None = field(init=False, default=None)
    _generating: Future[None] = field(init=False, default_factory=Future)
    _changed: Condition = field(init=False, default_factory=Condition)
    _next: int = field(init=False, default=0)
    _paused: bool = field(init=False, default=False)

    def publish(self) -> None:
        """Sends the weights to the rollout's ranks, unless training would wait for episodes that it does not need yet."""
        with self._changed:
            waits = not self._ahead or self._ahead[0].rows is None
            due = self._published < 0 or (not self._is_over and (waits or (self._is_too_old and not self._is_busy)))
            self._pause(due)
        if due:
            self.refresh()
            self._pause(False)

    def refresh(self) -> None:
        """Sends the actor's present weights, unless the ranks have them, when a batch in work is over.  No further one begins
        before the next publication."""
        self._pause(True)
        self._wait_for(lambda: not self._is_busy)
        if self._published != self.policy_version:
            self.groups.weights.sync(self.policy_version)
            self._published = self.policy_version

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        """Returns the oldest batch, when its episodes are over."""
        if self._thread is None:
            if self.policy_version == 0:
                self.log.start()
            self._next = step
            self._thread = LoopThread(AHEAD)
            self._generating = self._thread.ask(self._generate, prompts)
            self._generating.add_done_callback(lambda _: self._notify())
        with self.timers.measure("wait_for_episodes"):
            self._wait_for(lambda: bool(self._ahead) and self._ahead[0].rows is not None)
        with self._changed:
            current = self._ahead.popleft()
        self._wait_for(lambda: self._is_busy or self._is_too_old or self._is_over)  # the next one begins before the next weights
        assert current.rows is not None, "waited for above"
        batch = self.generator.rewarded(current.rows())
        if self._bound:
            batch.meta_info["policy_version"] = self.policy_version
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

    @property
    def _is_busy(self) -> bool:
        """Returns whether episodes run."""
        return bool(self._ahead) and self._ahead[-1].rows is None

    @property
    def _is_too_old(self) -> bool:
        """Returns whether the next batch would be beyond the bound with the published weights."""
        return self._next - 1 - self._published > self._bound

    @property
    def _is_over(self) -> bool:
        """Returns whether no further batch is to begin."""
        return self._next > self.last_step

    def _generate(self, scenes: Iterator[DataProto]) -> None:
        """Lets the ranks run one batch after the other, up to the last step's; on the thread."""
        while (begun := self._begin(scenes)) is not None:
            batch, asked = begun
            over = self.generator.submit(asked, batch.version if self._bound else None)()
            rows = self._put(over, batch.step)
            with self._changed:
                batch.rows = rows
                self._changed.notify_all()

    def _begin(self, scenes: Iterator[DataProto]) -> tuple[BatchAhead, DataProto] | None:
        """Waits until a batch of the published weights may begin; returns it with its scenes, None after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or (not self._paused and not self._is_too_old))
            if self._is_over:
                return None
            position = self.loader.state()
            asked = next(scenes)
            ordinals = asked.batch["ordinal"].tolist()
            batch = BatchAhead(step=self._next, ordinals=ordinals, position=position, version=self._published)
            self._ahead.append(batch)
            self._next += 1
            self._changed.notify_all()
            return batch, asked

    def _put(self, batch: Batch, step: int) -> Callable[[], Batch]:
        """Lets the rollout's ranks give the rows away, where they train elsewhere; returns what gets them there."""
        if not self._bound or not isinstance(batch, BatchRef):
            return lambda: batch
        return self.groups.dealing(self.config).begin_receive(self.groups.actor, batch, step)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits for the thread.  Raises what it failed with."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._generating.done())
        if self._generating.done():
            self._generating.result()

    def _pause(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread; one that waits for ranks ends with them."""
        self.last_step = 0
        self._notify()
        if self._thread is not None:
            self._thread.stop_soon()

    def select(self, samples: Samples) -> Batch:
        """Returns all samples."""
        return samples.batch

    def trained(self, step: int) -> None:
        """Takes notice that the step's scenes have trained."""
        self.policy_version = step
        self.log.ended(self._trains, Phase.TRAINED, "")

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes what the generator has to remember."""
        return self.generator.save(folder)

    def state(self) -> dict[str, Any]:
        """Returns the loader's state before the first scene that has not trained."""
        with self._changed:
            position = self._ahead[0].position if self._ahead else self.loader.state()
        return {"loader": position, "policy_version": self.policy_version}

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """Raises CheckpointError for what only a rollout service can go on with."""
        if STREAMED in state:
            raise CheckpointError(PROMPTS_IN_WORK)
        self.loader.load_state(state["loader"])
        self.policy_version = state["policy_version"]
        self.generator.load(folder)
        self.log.load_state({"next_ordinal": state["loader"]["consumed"], "open": []})
