"""Training batches out of episodes that run all the time: publication, what a checkpoint holds, rewards of several workflows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import RewardError
from rlhub.models.tokenizer import Vocabulary
from rlhub.protocol import DataProto
from rlhub.rewards import RewardOutcome
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.trainer.ppo.episode_scoring import OutcomeStore
from rlhub.trainer.ppo.stream_source import PromptLog, StreamSource, complete_rewards
from rlhub.utils.timing import PhaseTimer
from tests.support.episodes import Immediate, Policy, executing, parts
from tests.unit.trainer.ppo.test_episode_scoring import group
from tests.unit.trainer.ppo.test_stream_source_prompts import loader

BATCH = 4


@dataclass
class FakePublisher:
    """Publishes at once: the policy of the episodes has the version when `publish` returns."""

    policy: Policy
    published: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def publish(self, version: int, announce: Callable[[int], None]) -> None:
        self.published.append(version)
        self.policy.version = version
        announce(version)

    def wait(self) -> None: ...


@contextmanager
def streaming(folder: Path, max_staleness: int = 1, keep: Callable[[Group], bool] | None = None) -> Iterator[StreamSource]:
    """A source over episodes that end at once."""
    config, policy, log = PPOConfig(), Policy(), PromptLog(folder / "prompts.jsonl")
    config.data.train_batch_size, config.trainer.max_staleness = BATCH, max_staleness
    staleness, ledger = StalenessManager(batch=BATCH, max_staleness=max_staleness), PromptLedger(on_end=log.ended)
    with executing(Immediate(parts()), engine=policy, staleness=staleness, ledger=ledger, keep=keep) as executor:
        yield StreamSource(
            config=config,
            loader=loader(),  # type: ignore[arg-type]
            executor=executor,
            publisher=FakePublisher(policy),  # type: ignore[arg-type]
            outcomes=OutcomeStore(),
            vocabulary=Vocabulary(size=1000, stop_token_ids=(), pad_id=0),
            log=log,
            timers=PhaseTimer(),
        )


def take_step(source: StreamSource, step: int, prompts: Iterator[DataProto]) -> list[int]:
    """Goes through a step as the trainer does; returns the ordinals of its batch."""
    source.publish()
    source.publish()  # nothing happens: a validation may have asked before
    samples = source.sample(prompts, step)
    samples.batch.batch["valid"] = torch.ones(BATCH, dtype=torch.bool)
    batch = source.select(samples)
    source.trained(step)
    assert batch.meta_info["policy_version"] == step - 1
    return [int(ordinal) for ordinal in batch.batch["ordinal"]]


def admissible(source: StreamSource) -> int:
    """Returns how many groups the bound admits in all at one moment: those done, those running and those that may start."""
    staleness = source.executor.staleness
    return source.executor.runner.ask(lambda: staleness.accepted + staleness.running + staleness.capacity).result(30)


def test_each_version_is_published_once_and_the_last_never(tmp_path: Path) -> None:
    with streaming(tmp_path) as source:
        prompts: Any = source.loader.endless()
        trained = [take_step(source, step, prompts) for step in (1, 2, 3)]
        assert trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert source.publisher.published == [0, 1, 2]  # type: ignore[attr-defined]
    ends = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [(row["ordinal"], row["step"]) for row in ends if row["end"] == "trained"] == [(n, n // BATCH + 1) for n in range(12)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run_goes_on_from_a_checkpoint_whose_weights_were_never_published(tmp_path: Path, max_staleness: int) -> None:
    """Steps are saved before the next one publishes: the prompts that they trained have ended all the same."""
    with streaming(tmp_path, max_staleness) as source:
        prompts: Any = source.loader.endless()
        assert [take_step(source, step, prompts) for step in (1, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        source.save(tmp_path)
        state = json.loads(json.dumps(source.state()))
        source.publish()
        admitted = admissible(source)
    saved = json.loads((tmp_path / "rollouts.json").read_text())["executor"]
    assert saved["staleness"] == {"version": 2} and saved["ledger"]["counts"]["trained"] == 2 * BATCH
    with streaming(tmp_path, max_staleness) as source:
        source.load_state(state, tmp_path)
        assert admissible(source) == admitted
        assert source.executor.first_ordinal == 2 * BATCH
        prompts = source.loader.endless()
        assert take_step(source, 3, prompts) == [8, 9, 10, 11]
        assert source.publisher.published == [2]  # type: ignore[attr-defined]


def test_a_run_goes_on_in_the_middle_of_a_batch_of_prompts(tmp_path: Path) -> None:
    """Prompt 1 was turned down and another one drawn for it, and no prompt was in work when the step was saved."""
    with streaming(tmp_path, 0, keep=lambda group: group.ordinal != 1) as source:
        prompts: Any = source.loader.endless()
        assert take_step(source, 1, prompts) == [0, 2, 3, 4]
        source.save(tmp_path)
        state = source.state()
    with streaming(tmp_path, 0) as source:
        source.load_state(state, tmp_path)
        prompts = source.loader.endless()
        assert take_step(source, 2, prompts) == [5, 6, 7, 8]


def test_samples_of_other_workflows_in_the_batch_get_what_the_function_scored() -> None:
    """On the last token; one that could not be scored ends the run."""
    groups = [group(0, 2, rewards=0.5), group(1, 3)]
    complete_rewards(groups, [RewardOutcome(score=1.0), RewardOutcome(score=2.0)])
    assert [one.trajectories[0].rewards for one in groups] == [[0.5, 0.5], [0.0, 0.0, 2.0]]
    plain = [group(0, 2)]
    complete_rewards(plain, [None])
    assert plain[0].trajectories[0].rewards is None
    with pytest.raises(RewardError, match="no reward function"):
        complete_rewards([group(0, 2, rewards=0.5), group(1, 3)], [None, None])
