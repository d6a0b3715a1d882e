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
from rlhub.agents.remote.trajectory_store import TrajectoryStore
from rlhub.agents.trajectory import Episode, Trajectory, TrajectoryRef
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardFailure, RewardOutcome, RewardRequest
from rlhub.rewards.base import OUTCOMES, ManagerParts
from rlhub.rewards.managers import NaiveManager
from rlhub.rewards.rows import RowScorer, pack_outcomes
from rlhub.rollout_service.executor.batches import of_rows, to_batch
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.trainer.ppo.episode_scoring import GroupScoring, OutcomeStore, SignalFilter
from rlhub.trainer.ppo.scoring import Scorer, add_baseline
from rlhub.trainer.ppo.stream_source import complete_rewards
from rlhub.utils.timing import PhaseTimer


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


def several(*rows: tuple[int, str, float | None]) -> Episode:
    """An episode of rows of these lengths, comparisons and rewards."""
    made = []
    for length, comparison, reward in rows:
        (row,) = group(0, length).trajectories
        assert isinstance(row, Trajectory)
        row.comparison = comparison
        if reward is not None:
            row.set_reward(reward)
        made.append(row)
    return Episode(trajectories=made)


def test_of_an_episode_of_several_rows_the_last_is_scored_and_all_have_its_score() -> None:
    one, pool = group(0, 9, 9), Pool()
    one.trajectories = [several((3, "", None), (2, "", None)), one.trajectories[0]]
    scoring = scoring_of(pool)
    (outcomes,) = scored(scoring, one)
    assert [outcome.score for outcome in outcomes] == [2.0, 9.0] and sum(pool.calls) == 2
    batch = to_batch([one], pad_id=0)
    batch.non_tensor_batch[OUTCOMES] = object_array(of_rows([one], scoring.outcomes.take(one)))
    result = manager()(batch)
    assert result.scores.tolist() == [2.0, 2.0, 9.0]
    complete_rewards([one], [RewardOutcome(score=1.0)] * 2)
    assert "scores" not in to_batch([one], pad_id=0).batch.keys(), "nobody has rewards of its own"
    one.trajectories[1].set_reward(5.0)
    complete_rewards([one], outcomes)
    assert to_batch([one], pad_id=0).batch["scores"].tolist() == [2.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("samples", "kept"),
    [
        ([several((2, "", 1.0), (3, "", 1.0)), several((2, "", 1.0))], False),
        ([several((2, "", 1.0), (3, "", 1.0)), several((2, "", 0.0))], True),
        ([several((2, "a", 1.0), (3, "b", 0.0)), several((2, "a", 1.0), (1, "b", 0.0))], False),
        ([several((2, "a", 1.0), (3, "b", -1.0)), several((2, "a", -1.0), (1, "b", 1.0))], True),
        ([several((2, "a", 1.0), (3, "b", 0.0)), several((2, "a", 1.0))], False),
    ],
    ids=["equal", "different", "equal by name", "different by name", "a name of one episode"],
)
def test_a_group_is_filtered_by_the_rewards_of_its_episodes(samples: list[Episode], kept: bool) -> None:
    one = group(0, 1, 1)
    found = Group(item=one.item, trajectories=samples)
    scorer = Scorer(reward=manager(), timers=PhaseTimer(), metric="seq_reward")
    keeps = SignalFilter(scorer, OutcomeStore(), most=9)
    assert keeps(found) is kept


def test_the_baseline_of_a_prompt_is_that_of_all_of_its_rows() -> None:
    columns = {"scores": torch.arange(6.0), "valid": torch.ones(6, dtype=torch.bool)}
    greedy = {"scores": torch.tensor([7.0, 8.0]), "valid": torch.tensor([True, False])}
    add_baseline(columns, greedy, torch.tensor([4, 4, 9, 9, 9, 9]))
    assert columns["baseline_rewards"].tolist() == [7.0] * 2 + [8.0] * 4
    assert columns["valid"].tolist() == [True] * 2 + [False] * 4


def test_an_episode_of_several_rows_is_what_a_checkpoint_holds() -> None:
    one = group(4, 2, 3)
    one.trajectories = [several((3, "a", 1.0), (2, "b", 0.5)), one.trajectories[1]]
    kept = TrajectoryStore("here").keep_episode("4-0/1", one.trajectories[0])
    one.baseline = kept
    assert Group.from_json(json.loads(json.dumps(one.to_json())), one.item) == one
    assert [row.key for row in kept.trajectories] == ["4-0/1.0", "4-0/1.1"]  # type: ignore[union-attr]
