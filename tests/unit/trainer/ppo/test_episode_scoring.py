"""Scores of finished episodes: asked together, kept until their prompts have ended, and the same as those of a whole batch."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhub.agents.remote.holders import Holders
from rlhub.agents.trajectory import Trajectory, TrajectoryRef
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardFailure, RewardOutcome, RewardRequest
from rlhub.rewards.base import OUTCOMES, ManagerParts
from rlhub.rewards.managers import NaiveManager
from rlhub.rewards.rows import RowScorer, pack_outcomes
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.trainer.ppo.episode_scoring import GroupScoring, OutcomeStore


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


def scoring_of(pool: Any) -> GroupScoring:
    return GroupScoring(RowScorer(pool, Decoder()), OutcomeStore())


def scored(scoring: GroupScoring, *groups: Group) -> list[list[RewardOutcome]]:
    async def run() -> None:
        await asyncio.gather(*map(scoring, groups))

    asyncio.run(run())
    return [scoring.outcomes.by_ordinal.get(one.ordinal, []) for one in groups]


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
    pool = Pool()
    found = scored(scoring_of(pool), *(group(n, n + 1, n + 2) for n in range(5)))
    assert [[outcome.score for outcome in one] for one in found] == [[n + 1, n + 2] for n in range(5)]
    assert sum(pool.calls) == 10 and len(pool.calls) <= 3


def test_a_baseline_is_scored_after_the_samples_and_is_none_of_them() -> None:
    whole, scoring = group(4, 1, 2, 3), scoring_of(Pool())
    *samples, baseline = whole.trajectories
    one = Group(item=whole.item, trajectories=samples, baseline=baseline)
    scored(scoring, one)
    kept = scoring.outcomes
    assert [outcome.score for outcome in kept.take(one) if outcome] == [1, 2]
    found = kept.take_baseline(one)
    assert found is not None and found.score == 3
    assert kept.take_baseline(group(5, 1)) is None
    assert Group.from_json(json.loads(json.dumps(one.to_json())), one.item) == one


def test_a_workflows_own_reward_is_not_scored_again() -> None:
    own, pool = group(0, 3, 2), Pool()
    own.trajectories[0].set_reward(1.5)
    (found,) = scored(scoring_of(pool), own)
    assert [outcome.score for outcome in found] == [1.5, 2.0] and pool.calls == [1]
    assert scored(scoring_of(pool), group(1, 3, rewards=0.5)) == [[]] and pool.calls == [1]


def test_an_error_of_the_pool_reaches_whoever_asked() -> None:
    pool = Pool()
    pool.score = lambda requests: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(ZeroDivisionError):
        scored(scoring_of(pool), group(0, 1))


def test_each_process_scores_its_own_rows() -> None:
    """Rows of two processes and one whose tokens are here, in the order of the group."""
    pool, holders, whole = Pool(), Elsewhere(), group(0, 1, 2, 3, 4)
    trajectories = whole.trajectories
    kept = [holders.keep(f"host-{row % 2}", str(row), one) for row, one in enumerate(trajectories[:3])]
    scoring = scoring_of(pool)
    scoring.holders = holders
    (found,) = scored(scoring, Group(item=whole.item, trajectories=[*kept, trajectories[3]]))
    assert [outcome.score for outcome in found] == [1, 2, 3, 4]
    assert pool.calls == [1] and sorted(holders.calls) == [("host-0", 2), ("host-1", 1)]


class Elsewhere(Holders):
    """Processes that keep rows, in this one."""

    def __init__(self) -> None:
        super().__init__(None)
        self.stores: dict[str, dict[str, Trajectory]] = {}
        self.calls: list[tuple[str, int]] = []

    def keep(self, home: str, key: str, trajectory: Any) -> TrajectoryRef:
        self.stores.setdefault(home, {})[key] = trajectory
        return TrajectoryRef.of(trajectory, home, key)

    async def _call_actor(self, home: str, method: str, *args: Any) -> Any:
        assert method == "score"
        keys, prompt = args
        assert set(prompt) == {"data_source", "ground_truth", "extra_info"}
        self.calls.append((home, len(keys)))
        lengths = [len(self.stores[home][key].response_ids) for key in keys]
        return pack_outcomes([RewardOutcome(score=float(length)) for length in lengths])


def batch_of(outcomes: list[RewardOutcome | None]) -> DataProto:
    count = len(outcomes)
    mask = torch.ones(count, 3, dtype=torch.long)
    texts = {name: object_array([name] * count) for name in ("data_source", "ground_truth", "extra_info")}
    columns = {"responses": mask * 7, "response_length": mask.sum(1)}
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
    kept = OutcomeStore()
    for ordinal in range(3):
        kept.put(ordinal, [RewardOutcome(score=float(ordinal), details={"acc": True})])
    kept.put(3, [RewardOutcome(error=RewardFailure(kind="raised", message="no"))])
    kept.forget(1)
    again = OutcomeStore()
    again.load_state(json.loads(json.dumps(kept.state([{"ordinal": ordinal} for ordinal in (1, 2, 3)]))))
    assert again.by_ordinal == {ordinal: kept.by_ordinal[ordinal] for ordinal in (1, 2)}, "a failed one is scored again"
    assert again.take(group(9, 1, 1)) == [None, None]
