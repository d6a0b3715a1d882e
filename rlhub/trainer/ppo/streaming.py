"""StreamSampler: training batches out of episodes that run all the time.

    prompts -> WorkflowExecutor: episodes on the rollout service -> scored groups -> a batch, as soon as there are enough
    weights -> folder -> replicas, while episodes go on

The same for every bound on staleness.  At 0 the executor starts the next step's prompts when the step's weights have arrived,
which makes batches and weights those of whole-batch generation; a larger bound only lets it start them earlier.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhub.agents.remote.actor_pool import ActorPool
from rlhub.checkpoint.files import FileEntry, write_file
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.prompts import PromptLoader
from rlhub.errors import RewardError, WorkflowError
from rlhub.models.tokenizer import Vocabulary
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardOutcome
from rlhub.rewards.naive import OUTCOMES
from rlhub.rollout_service.executor.batches import episode_metrics, to_batch
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.rollout_service.executor.executor import WorkflowExecutor
from rlhub.trainer.ppo.positions import Positions
from rlhub.trainer.ppo.prompt_log import PromptLog
from rlhub.trainer.ppo.publishing import Publisher
from rlhub.trainer.ppo.sampling import STREAMED, add_baseline, merge
from rlhub.trainer.ppo.scoring import Scorer
from rlhub.trainer.ppo.scoring_ahead import KeptOutcomes
from rlhub.utils.timing import PhaseTimer

UNDER_WAY = "rollouts.json"
"""In a checkpoint's folder: prompts that have been drawn and have not ended."""


@dataclass(slots=True, kw_only=True)
class StreamSampler:
    """See BatchSource.  outcomes: where the executor's hook puts what each group was scored.  hosts: theirs are reported too."""

    config: PPOConfig
    loader: PromptLoader
    executor: WorkflowExecutor
    publisher: Publisher
    outcomes: KeptOutcomes
    scorer: Scorer
    vocabulary: Vocabulary
    log: PromptLog
    timers: PhaseTimer
    hosts: Sequence[ActorPool] = ()
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    policy_version: int = field(init=False, default=0)
    positions: Positions = field(init=False)
    _frontier: int = field(init=False, default=0)
    _drawing: bool = field(init=False, default=False)
    _sampled_at: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.positions = Positions(self.loader)

    def start(self) -> None:
        """Give the replicas their first weights, and wait for them: nothing could generate before."""
        if self.policy_version == 0:
            self.log.start()
        self.publisher.publish(self.policy_version, self.executor.set_version)
        self.publisher.wait()

    def sample(self, prompts: Iterator[DataProto], step: int) -> DataProto:
        """The finished groups with the lowest ordinals, in the order of their ordinals, scored."""
        self.log.step = step
        if not self._drawing:
            self._drawing = True
            self.executor.start(self.positions.items(prompts))
        with self.timers.measure("wait_for_episodes"):
            groups = self._groups(step)
        self.log.take(step, [group.ordinal for group in groups])
        counters = self.executor.metrics_soon()
        batch = self._batch(groups, [outcome for group in groups for outcome in self.outcomes.take(group)])
        metrics = episode_metrics(groups) | self._score(batch, groups)
        self.metrics = self._measure(counters.result()) | metrics
        batch.batch["valid"] = batch.batch["valid"] & torch.tensor([valid for group in groups for valid in group.valid])
        return batch

    def _groups(self, step: int) -> list[Group]:
        wanted = self.config.data.train_batch_size
        groups = self.executor.next_groups(wanted, self.config.trainer.deadline_s.generate, step=step)
        if len(groups) < wanted:
            raise WorkflowError(f"step {step} needs {wanted} groups of episodes; only {len(groups)} came, and no prompt is left")
        return groups

    def _score(self, batch: DataProto, groups: Sequence[Group]) -> dict[str, float]:
        """The metrics of scoring the samples, and their prompts' greedy responses where there are any."""
        metrics = self.scorer(batch)
        greedy = [Group(item=group.item, trajectories=[group.baseline]) for group in groups if group.baseline is not None]
        if not greedy:
            return metrics
        baselines = self._batch(greedy, [self.outcomes.take_baseline(group) for group in groups])
        return merge(metrics, add_baseline(batch, baselines, self.scorer))

    def _batch(self, groups: Sequence[Group], outcomes: Sequence[RewardOutcome | None]) -> DataProto:
        complete_rewards(groups, outcomes)
        batch = to_batch(groups, pad_id=self.vocabulary.pad_id, vocab_size=self.vocabulary.size)
        batch.non_tensor_batch[OUTCOMES] = object_array(outcomes)
        batch.meta_info["policy_version"] = self.policy_version
        return batch

    def _measure(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Counters since the last batch, and the share of this time in which training had nothing to train on."""
        now = time.perf_counter()
        passed, self._sampled_at = now - self._sampled_at, now
        return {
            **counters,
            "trainer/idle_share": min(counters["rollout/wait_s"] / max(passed, 1e-9), 1.0),
            **self.publisher.metrics,
            **{name: value for hosts in self.hosts for name, value in hosts.metrics().items()},
        }

    def publish(self, version: int) -> None:
        """Write the weights and go on; replicas take them one by one, between two tokens."""
        self.policy_version = version
        self.publisher.publish(version, self.arrived)

    def arrived(self, version: int) -> None:
        """Generation has this version from now on, and what was taken for the step that made it is trained.  On the event loop:
        training does not wait for it."""
        self.executor.set_version(version)
        frontier = self.executor.first_ordinal
        self.positions.forget(frontier)
        self.outcomes.forget(frontier)

    def save(self, folder: Path) -> list[FileEntry]:
        """What is under way: the ledger, finished samples with their scores, and what is written of the others."""
        self.publisher.wait()
        executor = self.executor.state()
        under_way = {"executor": executor, "outcomes": self.outcomes.state(executor["finished"])}
        self._frontier = frontier_of(executor["ledger"])
        return [write_file(folder / UNDER_WAY, json.dumps(under_way).encode("utf-8"))]

    def state(self) -> dict[str, Any]:
        """The prompts from the first that had not ended when `save` looked."""
        return {
            "loader": self.positions.state(self._frontier),
            "policy_version": self.policy_version,
            STREAMED: {"file": UNDER_WAY},
        }

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        self.policy_version = state["policy_version"]
        if STREAMED in state:
            under_way = json.loads((folder / state[STREAMED]["file"]).read_text())
            self.outcomes.load_state(under_way["outcomes"])
            self.executor.load_state(under_way["executor"])
            self.log.load_state(under_way["executor"]["ledger"])
        else:
            self.executor.load_state(after_whole_batches(state))
        self.loader.load_state(state["loader"])


def complete_rewards(groups: Sequence[Group], outcomes: Sequence[RewardOutcome | None]) -> None:
    """Where some workflows of the batch set rewards of their own, give the other samples what the reward function scored.

    RewardError for one whose scoring failed: the policy for failures is the whole batch's, which is not scored as one then.
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
    """The lowest ordinal that has not ended, in a ledger's state: the ledger itself has gone on since."""
    return min((int(ordinal) for ordinal, _ in ledger["open"]), default=int(ledger["next_ordinal"]))


def after_whole_batches(state: Mapping[str, Any]) -> dict[str, Any]:
    """The executor's state after steps with rollout.mode=sync: every prompt that was drawn has ended."""
    first = int(state["loader"]["consumed"])
    return {
        "ledger": {"next_ordinal": first, "open": [], "counts": {"trained": first, "rejected": 0, "dropped": 0}},
        "staleness": {"version": state["policy_version"]},
        "finished": [],
        "begun": [],
    }
