"""The parts of a stream of training batches: publication, positions in the data, scores ahead, the log of prompts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.agents.trajectory import Trajectory
from rlhub.data.order import ResumableLoader
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardFailure, RewardOutcome, RewardRequest
from rlhub.rewards.base import ManagerParts
from rlhub.rewards.naive import OUTCOMES, NaiveManager
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.executor.ledger import Phase
from rlhub.trainer.ppo.positions import Positions
from rlhub.trainer.ppo.prompt_log import PromptLog
from rlhub.trainer.ppo.publishing import Publisher
from rlhub.trainer.ppo.scoring_ahead import AheadScorer, KeptOutcomes
from rlhub.trainer.ppo.streaming import complete_rewards
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.timing import PhaseTimer


class Service:
    """A publication that lasts until it is let go."""

    def __init__(self) -> None:
        self.go, self.published = threading.Event(), list[int]()
        self.error: Exception | None = None

    async def update(self, folder: str, version: int) -> None:
        assert await asyncio.to_thread(self.go.wait, 60)
        if self.error is not None:
            raise self.error
        self.published.append(version)

    def metrics(self) -> dict[str, float]:
        return {"rollout/pause_s": 0.5}


class Publishing:
    """A publisher with everything it was told to do."""

    def __init__(self) -> None:
        self.service, self.written, self.announced, self.failed = Service(), list[int](), list[int](), list[BaseException]()
        self.thread = LoopThread("service")
        self.publisher = Publisher(
            self.service,
            self.thread.loop,
            "folder",
            write=lambda folder, version: self.written.append(version),
            fail=self.failed.append,
            timers=PhaseTimer(),
        )

    def close(self) -> None:
        self.publisher.close()
        self.thread.stop()


def test_training_goes_on_when_its_weights_are_written() -> None:
    parts = Publishing()
    parts.publisher.publish(1, parts.announced.append)
    assert parts.written == [1] and parts.announced == []
    parts.service.go.set()
    parts.publisher.publish(2, parts.announced.append)  # waits for the one before, whose files may go now
    parts.publisher.publish(3, lambda version: parts.announced.append(version * parts.thread.is_current))
    parts.publisher.wait()
    parts.close()
    assert parts.announced == parts.service.published == [1, 2, 3] and parts.publisher.metrics["rollout/pause_s"] == 0.5


def test_a_publication_that_fails_is_told_to_whoever_waits_for_samples() -> None:
    parts = Publishing()
    parts.service.error = OSError("no space")
    parts.service.go.set()
    parts.publisher.publish(1, parts.announced.append)
    with pytest.raises(OSError, match="no space"):
        parts.publisher.wait()
    parts.close()
    assert parts.announced == [] and isinstance(parts.failed[0], OSError)


class Numbers:
    """Rows that are their own number."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return 10

    def batch(self, indices: Any) -> DataProto:
        tokens = torch.tensor(indices)[:, None] + 100
        return DataProto.from_dict({"prompts": tokens, "attention_mask": torch.ones_like(tokens)}, {"name": indices.astype(str)})


def loader() -> ResumableLoader:
    return ResumableLoader(Numbers(), 4, seed=3)


def test_a_prompt_that_has_not_ended_is_found_again() -> None:
    """From the state for any ordinal, whatever was drawn since and forgotten before it, over epochs."""
    first = loader()
    positions = Positions(first)  # type: ignore[arg-type]
    items = positions.items(first.endless())
    drawn = [next(items) for _ in range(23)]
    assert [item.ordinal for item in drawn] == list(range(23))
    for ordinal in (0, 3, 4, 11, 22):
        positions.forget(ordinal)
        again = loader()
        again.load_state(positions.state(ordinal))
        found = next(item for item in Positions(again).items(again.endless()) if item.ordinal == ordinal)  # type: ignore[arg-type]
        assert found == drawn[ordinal]
    assert positions.state(22)["consumed"] == 20


class Pool:
    """Scores by length; remembers which requests came together."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def score(self, requests: Sequence[RewardRequest], *, max_failures: int | None = None) -> list[RewardOutcome]:
        self.calls.append(len(requests))
        threading.Event().wait(0.01)
        return [RewardOutcome(score=float(len(request.solution_str)), details={"rows": 1}) for request in requests]


class Decoder:
    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return ["x" * len(ids) for ids in sequences]


def manager(on_error: str = "fail") -> NaiveManager:
    pool: Any = Pool()
    parts = ManagerParts(pool=pool, tokenizer=Decoder(), max_response_length=8, on_error=on_error, max_error_rate=0.5)  # type: ignore[arg-type]
    return NaiveManager(parts)


def group(ordinal: int, *lengths: int, rewards: float | None = None) -> Group:
    row = {"data_source": "s", "ground_truth": "t", "extra_info": {}}
    item = PromptItem(prompt_ids=(1,), ordinal=ordinal, row=row)
    samples = [
        Trajectory(
            prompt_ids=[1],
            response_ids=[5] * length,
            response_mask=[1] * length,
            rollout_log_probs=[0.0] * length,
            versions=[0] * length,
            rewards=None if rewards is None else [rewards] * length,
        )
        for length in lengths
    ]
    return Group(item=item, trajectories=samples)


def test_groups_that_wait_are_scored_together_and_each_gets_its_own() -> None:
    scoring = AheadScorer(manager())

    async def run() -> list[list[RewardOutcome]]:
        return await asyncio.gather(*(scoring.outcomes(group(n, n + 1, n + 2)) for n in range(5)))

    found = asyncio.run(run())
    assert [[outcome.score for outcome in one] for one in found] == [[n + 1, n + 2] for n in range(5)]
    pool: Any = scoring.manager.parts.pool
    assert sum(pool.calls) == 10 and len(pool.calls) <= 3


def test_a_baseline_is_scored_after_the_samples_and_is_none_of_them() -> None:
    whole, kept = group(4, 1, 2, 3), KeptOutcomes()
    *samples, baseline = whole.trajectories
    one = Group(item=whole.item, trajectories=samples, baseline=baseline)
    kept.put(4, asyncio.run(AheadScorer(manager()).outcomes(one)))
    assert [outcome.score for outcome in kept.take(one) if outcome] == [1, 2]
    found = kept.take_baseline(one)
    assert found is not None and found.score == 3
    assert kept.take_baseline(group(5, 1)) is None
    assert Group.from_json(json.loads(json.dumps(one.to_json())), one.item) == one


def test_a_workflows_own_reward_is_not_scored_again() -> None:
    scoring = AheadScorer(manager())
    (outcome,) = asyncio.run(scoring.outcomes(group(0, 3, rewards=0.5)))
    pool: Any = scoring.manager.parts.pool
    assert outcome.score == 1.5 and pool.calls == []


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


def test_an_error_of_the_pool_reaches_whoever_asked() -> None:
    scoring = AheadScorer(manager())
    scoring._pool.score = lambda requests: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(scoring.outcomes(group(0, 1)))


def batch_of(outcomes: list[RewardOutcome | None]) -> DataProto:
    count = len(outcomes)
    mask = torch.ones(count, 3, dtype=torch.long)
    texts = {name: object_array([name] * count) for name in ("data_source", "ground_truth", "extra_info")}
    columns = {"responses": mask * 7, "attention_mask": torch.cat([mask, mask], 1)}
    return DataProto.from_dict(columns, texts | {OUTCOMES: object_array(outcomes)})


def test_a_batch_scored_ahead_has_the_scores_it_would_have_had() -> None:
    """Only rows without an outcome go to the pool, and all rows pass the policy for failures."""
    ahead: list[RewardOutcome | None] = [RewardOutcome(score=3.0, details={"rows": 1}), None]
    scored, plain = manager()(batch_of(ahead)), manager()(batch_of([None, None]))
    assert scored.scores.tolist() == plain.scores.tolist() == [3.0, 3.0] and scored.metrics == plain.metrics
    failed = RewardOutcome(error=RewardFailure(kind="raised", message="no"))
    masked = manager("mask")(batch_of([failed, None]))
    assert masked.valid.tolist() == [False, True] and masked.metrics["reward/num_failed"] == 1
    assert manager("fail").lenient()(batch_of([failed, failed])).valid.tolist() == [False, False]


def test_outcomes_are_kept_until_the_prompt_has_ended() -> None:
    kept = KeptOutcomes()
    for ordinal in range(3):
        kept.put(ordinal, [RewardOutcome(score=float(ordinal), details={"acc": True})])
    kept.put(3, [RewardOutcome(error=RewardFailure(kind="raised", message="no"))])
    kept.forget(1)
    again = KeptOutcomes()
    again.load_state(json.loads(json.dumps(kept.state([{"ordinal": ordinal} for ordinal in (1, 2, 3)]))))
    assert again.by_ordinal == {ordinal: kept.by_ordinal[ordinal] for ordinal in (1, 2)}, "a failed one is scored again"
    assert again.take(group(9, 1, 1)) == [None, None]


def test_a_resumed_run_takes_back_the_ends_of_prompts_in_work(tmp_path: Path) -> None:
    log = PromptLog(tmp_path / "prompts.jsonl")
    for ordinals, phase in (((0, 1), Phase.TRAINED), ((2,), Phase.DROPPED), ((5,), Phase.REJECTED)):
        log.ended(ordinals, phase, "why")
    log.load_state({"next_ordinal": 4, "open": [[1, "finished"], [3, "issued"]]})
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(row["ordinal"], row["end"]) for row in rows] == [(0, "trained"), (2, "dropped")]
    log.start()
    assert not log.path.exists()


def test_a_prompt_is_said_to_be_trained_in_the_step_that_took_it(tmp_path: Path) -> None:
    """Its weights may arrive when training is steps further, and those of several steps at once."""
    log = PromptLog(tmp_path / "prompts.jsonl")
    for step, ordinals in ((1, (0, 2)), (2, (1, 5)), (3, (3, 4))):
        log.take(step, ordinals)
    log.ended((0, 2, 1), Phase.TRAINED, "")
    log.ended((6,), Phase.REJECTED, "filtered out")
    log.ended((5, 3, 4), Phase.TRAINED, "")
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert {row["ordinal"]: row["step"] for row in rows} == {0: 1, 2: 1, 1: 2, 6: 3, 5: 2, 3: 3, 4: 3}
