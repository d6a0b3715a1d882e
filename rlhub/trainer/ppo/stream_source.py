"""StreamSource: training batches out of episodes that run all the time (rollout.mode=async).

    prompts -> WorkflowExecutor: episodes on the rollout service -> groups -> a batch, as soon as there are enough
    weights -> folder -> replicas, while episodes go on

The same for every bound on staleness.  At 0 the executor starts the next step's prompts when the step's weights have arrived,
which makes batches and weights those of whole-batch generation; at 1 generation is one step ahead, and beyond that fully
asynchronous: a larger bound only lets the executor start prompts earlier.

A prompt can be followed through such a run.  `LoaderPositions` lets a resumed run draw from the first prompt that has not ended,
and `PromptLog` writes prompts.jsonl, one line a prompt, whatever was killed in between:

    {"ordinal": 17, "end": "trained", "step": 3, "reason": ""}
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhub.agents.remote.actor_pool import ActorPool
from rlhub.agents.remote.holders import Holders
from rlhub.agents.remote.trajectory_store import WIDE, wide_names
from rlhub.agents.trajectory import Sampled, Trajectory, TrajectoryRef, answer_of, row_of
from rlhub.checkpoint.files import FileEntry, write_file
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.order import ResumableLoader
from rlhub.errors import HolderLostError, RewardError, WorkflowError
from rlhub.models.tokenizer import Vocabulary
from rlhub.protocol import Batch, DataProto
from rlhub.protocol.columns import object_array
from rlhub.protocol.exchange import RowSource
from rlhub.protocol.layout import ColumnInfo
from rlhub.rewards import RewardOutcome
from rlhub.rewards.base import OUTCOMES
from rlhub.rollout_service.executor.batches import episode_metrics, of_rows, prompt_columns, row_columns, score_rows, to_batch
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.executor.executor import WorkflowExecutor
from rlhub.rollout_service.executor.ledger import Phase
from rlhub.rollout_service.service import RolloutService
from rlhub.single_controller import WorkerGroup
from rlhub.trainer.ppo.dealing import TRAINING_MESH, Dealing
from rlhub.trainer.ppo.episode_scoring import OutcomeStore
from rlhub.trainer.ppo.feedback import SamplerFeedback
from rlhub.trainer.ppo.publication import Publisher
from rlhub.trainer.ppo.scoring import Samples
from rlhub.trainer.ppo.sync_source import STREAMED
from rlhub.utils.atomic import write_bytes
from rlhub.utils.timing import PhaseTimer

logger = logging.getLogger(__name__)
T = TypeVar("T")
ROLLOUTS_FILE = "rollouts.json"
"""In a checkpoint's folder: prompts that have been drawn and have not ended."""

MAY_TRAIN = "may_train"
"""Column (rows,) bool: false for the rows of a sample whose tokens are all beyond the bound on staleness."""


@dataclass(slots=True, kw_only=True)
class StreamSource:
    """Is the SampleSource of the asynchronous schedules.

    service: the replicas; a loop of one's own adds and removes them by service.add() and service.remove(name).
    outcomes: what the reward function returned for each finished group.  holders: keep the tokens of finished groups; None: the
    executor has them.  ranks: those that train, to which the dealing deals the rows.  actor_pools: report metrics
    of their own too.  replicas_sleep: the replicas' memory is the actor's from a step's last sample until the next weights.
    """

    config: PPOConfig
    loader: ResumableLoader
    executor: WorkflowExecutor
    publisher: Publisher
    outcomes: OutcomeStore
    vocabulary: Vocabulary
    log: PromptLog
    timers: PhaseTimer
    holders: Holders | None = None
    ranks: WorkerGroup | None = None
    dealing: Dealing | None = None
    actor_pools: Sequence[ActorPool] = ()
    service: RolloutService | None = None
    replicas_sleep: bool = False
    policy_version: int = field(init=False, default=0)
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    positions: LoaderPositions = field(init=False)
    feedback: SamplerFeedback = field(init=False)
    _sampled: tuple[Samples, Tensor, Tensor | None] | None = field(init=False, default=None)
    _published: int | None = field(init=False, default=None)
    _drawing: bool = field(init=False, default=False)
    _frontier: int = field(init=False, default=0)
    _sampled_at: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.positions, self.feedback = LoaderPositions(self.loader), SamplerFeedback(self.loader)

    def publish(self) -> None:
        """Returns when the weights are written; replicas take them one by one, between two tokens, while episodes go on.  The
        first publication is waited for: nothing could generate before."""
        if self._published == self.policy_version:
            return
        first, self._published = self._published is None, self.policy_version
        self.publisher.publish(self.policy_version, self.arrived)
        if first:
            self.publisher.wait()

    def arrived(self, version: int) -> None:
        """Takes notice that replicas generate with this version.  Called on the event loop: training does not wait for it.  The
        sampler learns from the steps behind this version before further prompts are drawn."""
        self.feedback.enter(version)
        self.executor.set_version(version)
        frontier = self.executor.first_ordinal
        self.positions.forget(frontier)
        self.outcomes.forget(frontier)

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        """Returns the finished groups with the lowest ordinals, in the order of their ordinals."""
        self.log.step = step
        if not self._drawing:
            self._drawing = True
            if self.policy_version == 0:
                self.log.start()
            first = self.executor.first_ordinal
            self.executor.start(dropwhile(lambda item: item.ordinal < first, self.positions.items(prompts)))
        with self.timers.measure("wait_for_episodes"):
            groups, samples = self._taken(step)
        if self.service is not None and self.replicas_sleep:
            with self.timers.measure("rollout_sleep"):
                self.service.sleep()
        self.log.take(step, [group.ordinal for group in groups])
        counters = self.executor.metrics_soon()
        may_train = of_rows(groups, [valid for group in groups for valid in group.valid])
        samples.batch.batch[MAY_TRAIN] = torch.tensor(may_train)
        self.metrics = self._measure(counters.result()) | episode_metrics(groups)
        self._sampled = samples, samples.batch.batch["ordinal"].clone(), samples.batch.batch.get("episode_id", None)
        return samples

    def select(self, samples: Samples) -> Batch:
        """Returns all samples: groups without signal were turned down as they finished."""
        columns = samples.scored().batch
        columns["valid"] = columns["valid"] & columns.pop(MAY_TRAIN)
        return samples.batch

    def trained(self, step: int) -> None:
        """Takes notice that the prompts of this step have ended, and of what they scored."""
        if self._sampled is not None and (scoring := self._sampled[0].scoring) is not None:
            _, ordinals, episodes = self._sampled
            self.feedback.note(scoring.columns, ordinals, episodes)
        self.feedback.trained(step)
        self._sampled = None
        self.policy_version = step
        self.executor.trained(step)

    def turned_down(self, rows: DataProto) -> None:
        """Takes notice of the scores of a group that does not train.  Called on the event loop."""
        self.feedback.note(rows.batch, rows.batch["ordinal"], rows.batch.get("episode_id", None))

    def _groups(self, step: int) -> list[Group]:
        wanted = self.config.data.train_batch_size
        groups = self.executor.next_groups(wanted, self.config.trainer.deadline_s.generate, step=step)
        if len(groups) < wanted:
            raise WorkflowError(f"step {step} needs {wanted} groups of episodes; only {len(groups)} came, and no prompt is left")
        return groups

    def _taken(self, step: int) -> tuple[list[Group], Samples]:
        """Returns the step's groups, and their samples; groups that are lost on the way are generated again."""
        while True:
            groups = self._groups(step)
            try:
                return groups, self._samples(groups, step)
            except HolderLostError as error:
                logger.warning("step %d takes groups anew: %s", step, error)
                self.executor.give_back(groups)

    def _samples(self, groups: Sequence[Group], step: int) -> Samples:
        """Returns the groups' samples; by reference, the training ranks have their tokens.  Raises HolderLostError."""
        build = self._batch if self.holders is None else self._by_reference
        outcomes = [outcome for group in groups for outcome in self.outcomes.take(group)]
        batch = build(groups, outcomes, f"episodes-{step}", step)
        greedy = [
            Group(item=group.item, trajectories=[answer_of(group.baseline)]) for group in groups if group.baseline is not None
        ]
        if not greedy:
            return Samples(batch=batch)
        judged = [self.outcomes.take_baseline(group) for group in groups]
        return Samples(batch=batch, greedy=build(greedy, judged, f"greedy-{step}"))

    def _batch(
        self, groups: Sequence[Group], outcomes: Sequence[RewardOutcome | None], key: str, step: int | None = None
    ) -> Batch:
        complete_rewards(groups, outcomes)
        batch = to_batch(groups, pad_id=self.vocabulary.pad_id, vocab_size=self.vocabulary.size)
        return self._with_outcomes(batch, of_rows(groups, outcomes))

    def _by_reference(
        self, groups: Sequence[Group], outcomes: Sequence[RewardOutcome | None], key: str, step: int | None = None
    ) -> Batch:
        """Lets the training ranks get the tokens from the processes that keep them.  step: where they will train in that step;
        None: equal parts in the order of the rows."""
        holders, ranks = self.holders, self.ranks
        assert holders is not None and ranks is not None, "built with both"
        complete_rewards(groups, outcomes)
        rows = [row for group in groups for row in group.rows if isinstance(row, TrajectoryRef)]
        names = wide_names(rows)

        def sources(chosen: np.ndarray) -> list[tuple[RowSource, np.ndarray]]:
            return self._on_loop(holders.sources([rows[row] for row in chosen.tolist()], names))

        numbers = row_columns(groups) | score_rows(groups)
        small = self._with_outcomes(DataProto.from_dict(numbers, prompt_columns(groups)), of_rows(groups, outcomes))
        columns = {name: ColumnInfo(WIDE[name], (), ragged=True) for name in names}
        if self.dealing is None or step is None:
            return ranks.collect(small, columns, sources, TRAINING_MESH, key)
        return self.dealing.collect(ranks, small, columns, sources, key, step)

    def _with_outcomes(self, batch: DataProto, outcomes: Sequence[RewardOutcome | None]) -> DataProto:
        batch.non_tensor_batch[OUTCOMES] = object_array(outcomes)
        batch.meta_info["policy_version"] = self.policy_version
        return batch

    def _measure(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Returns the counters since the last batch, and the share of this time in which training had nothing to train on."""
        now = time.perf_counter()
        passed, self._sampled_at = now - self._sampled_at, now
        return {
            **counters,
            "trainer/idle_share": min(counters["rollout/wait_s"] / max(passed, 1e-9), 1.0),
            **self.publisher.metrics,
            **self._kept(),
            **{name: value for pool in self.actor_pools for name, value in pool.metrics().items()},
        }

    def _kept(self) -> dict[str, float]:
        """Returns the rows that the processes keep now, this batch's included, their bytes, and how many were dropped so far."""
        if self.holders is None:
            return {}
        try:
            sizes = self._on_loop(self.holders.sizes()).values()
        except HolderLostError:
            return {}
        rows, num_bytes = (float(sum(column)) for column in zip(*sizes, strict=True))
        return {
            "rollout/kept_rows": rows,
            "rollout/kept_bytes": num_bytes,
            "rollout/dropped_rows": float(self.holders.num_dropped),
        }

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes the ledger, finished samples with what they were scored, and what has been generated of the others."""
        self.publisher.wait()
        executor, entries, rows = self._saved_rows(folder)
        executor["staleness"]["version"] = self.policy_version  # a resumed run begins with its publication
        rollouts = {"executor": executor, "outcomes": self.outcomes.state(executor["finished"]), "rows": rows}
        self._frontier = frontier_of(executor["ledger"])
        return [write_file(folder / ROLLOUTS_FILE, json.dumps(rollouts).encode("utf-8")), *entries]

    def _saved_rows(self, folder: Path) -> tuple[dict[str, Any], list[FileEntry], list[dict[str, Any]]]:
        """Returns the executor's state, the files of the rows that it names, and what is in which of them.  The processes that
        keep the rows write them."""
        if self.holders is None:
            return self.executor.state(), [], []
        runner = self.executor.runner
        runner.ask(self.holders.hold, True).result()
        try:
            while True:
                executor = self.executor.state()
                rows = [row for row in map(row_of, row_states(executor)) if isinstance(row, TrajectoryRef)]
                try:
                    return executor, *self._on_loop(self.holders.save(folder, rows))
                except HolderLostError as error:
                    logger.warning("the checkpoint will not hold the rows of a process: %s", error)
        finally:
            runner.ask(self.holders.hold, False).result()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.executor.runner.loop).result()

    def state(self) -> dict[str, Any]:
        """Returns the position of the first prompt that had not ended when `save` looked."""
        return {
            "loader": self.positions.state(self._frontier),
            "feedback": self.feedback.state(),
            "policy_version": self.policy_version,
            STREAMED: {"file": ROLLOUTS_FILE},
        }

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        self.policy_version = state["policy_version"]
        if STREAMED in state:
            rollouts = json.loads((folder / state[STREAMED]["file"]).read_text())
            self._load_rows(folder, rollouts)
            self.outcomes.load_state(rollouts["outcomes"])
            self.executor.load_state(rollouts["executor"])
            self.log.load_state(rollouts["executor"]["ledger"])
        else:
            self.executor.load_state(after_whole_batches(state))
        self.loader.load_state(state["loader"])
        self.feedback.load_state(state.get("feedback", ()))

    def _load_rows(self, folder: Path, rollouts: Mapping[str, Any]) -> None:
        """Gives the rows of a checkpoint to the processes that keep them now, and enters their new homes in its state.

        A checkpoint of a run with trainer.batches=driver has the tokens in the state, and such a run takes them back into it.
        """
        holders = self.holders or Holders(None)
        moved = self._on_loop(holders.load(folder, rollouts.get("rows", ())))
        for state in row_states(rollouts["executor"]):
            row: Sampled = row_of(state)
            if isinstance(row, TrajectoryRef):
                row.home, row.key = moved[row.home, row.key]
                if self.holders is None:
                    (row,) = self._on_loop(holders.read([row]))
            elif isinstance(row, Trajectory) and self.holders is not None:
                row = holders.adopt(row)
            state.clear()
            state.update(asdict(row))


def row_states(executor: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the state of each trajectory of ended episodes in the state of an executor."""
    for sample in _sample_states(executor):
        yield from sample.get("trajectories", [sample])


def _sample_states(executor: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for group in executor["finished"]:
        yield from group["trajectories"]
        if "baseline" in group:
            yield group["baseline"]
    for work in executor["begun"]:
        yield from (sample["trajectory"] for sample in work["samples"] if sample["trajectory"] is not None)


def complete_rewards(groups: Sequence[Group], outcomes: Sequence[RewardOutcome | None]) -> None:
    """Gives samples without rewards the reward function's, where some workflows of the batch set rewards of their own.

    Raises RewardError for one whose scoring failed: the policy for failures is that of a batch that is scored as a whole.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if all(trajectory.rewards is None for trajectory in trajectories):
        return
    for trajectory, outcome in zip(trajectories, outcomes, strict=True):
        if trajectory.rewards is None:
            if outcome is None or outcome.error is not None:
                why = "there is no reward function" if outcome is None or outcome.error is None else outcome.error.message
                raise RewardError(f"a sample without rewards of its workflow's own could not be scored: {why}")
            trajectory.set_reward(outcome.score)


def frontier_of(ledger: Mapping[str, Any]) -> int:
    """Returns the lowest ordinal that has not ended in a ledger's state: the ledger itself has gone on since."""
    return min((int(ordinal) for ordinal, _ in ledger["open"]), default=int(ledger["next_ordinal"]))


def after_whole_batches(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the executor's state after steps with rollout.mode=sync: every prompt that was drawn has ended."""
    first = int(state["loader"]["consumed"])
    return {
        "ledger": {"next_ordinal": first, "open": [], "counts": {"trained": first, "rejected": 0, "dropped": 0}},
        "staleness": {"version": state["policy_version"]},
        "finished": [],
        "begun": [],
    }


FILE = "prompts.jsonl"
"""In the run folder."""


class LoaderPositions:
    """Draws prompts from the loader, which remembers those in work.  One thread draws, another reads."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self.loader.remembers = True
        self._lock = threading.Lock()

    def items(self, batches: Iterator[DataProto]) -> Iterator[PromptItem]:
        """Yields the prompts of the batches, one by one."""
        while True:
            with self._lock:
                batch = next(batches)
            yield from prompt_items(batch)

    def state(self, first: int) -> dict[str, Any]:
        """Returns the loader's state from which the prompt with ordinal `first` comes next, or soon."""
        with self._lock:
            return self.loader.state(first)

    def forget(self, first: int) -> None:
        """Lets the loader forget prompts before `first`."""
        with self._lock:
            self.loader.forget(first)


def prompt_items(batch: DataProto) -> Iterator[PromptItem]:
    """Yields the prompts of a batch, without padding."""
    columns = batch.batch
    rows = zip(columns["prompts"].tolist(), columns["attention_mask"].sum(1).tolist(), columns["ordinal"].tolist(), strict=True)
    for number, (ids, length, ordinal) in enumerate(rows):
        row = {name: column[number] for name, column in batch.non_tensor_batch.items()}
        yield PromptItem(prompt_ids=tuple(ids[len(ids) - length :]), ordinal=ordinal, row=row)


class PromptLog:
    """Appends a line when a prompt ends: trained, rejected or dropped.

    `ended` is the ledger's on_end, called on the event loop.  step: the present training step; a line names the step that trained
    its prompt, or this one where the prompt was rejected or dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 0
        self._taken: dict[int, int] = {}  # ordinal -> the step that trains it, until it has

    def start(self) -> None:
        """Begins the log of a run: lines that an earlier run left here are not its own."""
        self.path.unlink(missing_ok=True)

    def take(self, step: int, ordinals: Iterable[int]) -> None:
        """Notes that these prompts train in this step, and end with it."""
        self.step = step
        self._taken.update(dict.fromkeys(ordinals, step))

    def ended(self, ordinals: Sequence[int], phase: Phase, reason: str) -> None:
        """Appends a line for each prompt, all in one write."""
        steps = [self._taken.pop(ordinal, self.step) for ordinal in ordinals]
        rows = [
            {"ordinal": ordinal, "end": phase.value, "step": step, "reason": reason}
            for ordinal, step in zip(ordinals, steps, strict=True)
        ]
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8"))
        finally:
            os.close(descriptor)

    def load_state(self, ledger: Mapping[str, Any]) -> None:
        """Keeps the lines of prompts that have ended as far as this ledger's state knows: the others are in work again, as the
        metrics of steps that a resumed run repeats are written again."""
        if not self.path.is_file():
            return  # the run was resumed in another folder
        next_ordinal, in_work = int(ledger["next_ordinal"]), {int(ordinal) for ordinal, _ in ledger["open"]}
        kept = [
            line
            for line in self.path.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n") and (ordinal := json.loads(line)["ordinal"]) < next_ordinal and ordinal not in in_work
        ]
        write_bytes(self.path, b"".join(kept))
