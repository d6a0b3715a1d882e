"""Rows with scores keep them, and the scorer's own numbers become columns where somebody reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlhub.algorithms.estimation import reward_components, token_rewards
from rlhub.algorithms.statistics import HERE
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.rewards.base import RewardResult
from rlhub.trainer.ppo.scoring import Samples, Scorer, add_scores, component
from rlhub.utils.timing import PhaseTimer

ROWS = 3


def objects(*values: Any) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def result(extra: dict[str, np.ndarray], valid: list[bool] | None = None, num_failed: int = 0) -> RewardResult:
    scores = torch.tensor([1.0, 0.0, 0.5])
    return RewardResult(
        scores=scores,
        valid=torch.tensor(valid or [True] * ROWS),
        extra=extra,
        metrics={"reward/num_failed": float(num_failed)},
    )


class CountingReward:
    def __init__(self, answer: RewardResult) -> None:
        self.answer, self.calls = answer, 0

    def __call__(self, batch: DataProto) -> RewardResult:
        self.calls += 1
        return self.answer

    def close(self) -> None: ...


def batch() -> DataProto:
    return DataProto.from_dict({"responses": torch.zeros(ROWS, 2), "response_mask": torch.tensor([[1, 1], [1, 0], [1, 1]])})


EXTRA = {"correct": np.array([1.0, 0.0, 1.0]), "format": objects(True, 2, 0.5), "note": objects("a", None, "b")}


def test_rewards_of_tools_join_the_score_of_valid_samples() -> None:
    """In numbers where scores are made, and on their tokens where advantages are."""
    rows = batch()
    rows.batch["added_rewards"] = torch.tensor([[0.5, 0.0], [0.25, 0.25], [0.0, 0.0]])
    rows.batch["tool_rewards"] = rows.batch["added_rewards"].double().sum(1)
    Scorer(reward=CountingReward(result({}, valid=[True, False, True])), timers=PhaseTimer(), metric="score").score_rows(rows)
    assert rows.batch["scores"].tolist() == [1.5, 0.0, 0.5] == rows.batch["group_metric"].tolist()
    assert "token_level_scores" not in rows.batch.keys()
    rewards, _ = token_rewards(dict(rows.batch.items()), rows.batch["response_mask"], HERE, AlgorithmConfig(), 0.0)
    assert rewards.tolist() == [[0.5, 1.0], [0.0, 0.0], [0.0, 0.5]]


def test_rows_that_come_with_scores_keep_them() -> None:
    reward, rows = CountingReward(result({})), batch()
    score = Scorer(reward=reward, timers=PhaseTimer())
    assert score.score_rows(rows) == {"reward/num_failed": 0.0}
    assert score.score_rows(rows) == {} and reward.calls == 1
    assert rows.batch["scores"].tolist() == [1.0, 0.0, 0.5]
    assert set(rows.batch.keys()) == {"responses", "response_mask", "scores", "valid", "correct"}


def test_scores_find_their_rows_after_these_were_dealt_to_ranks() -> None:
    """Control: put in the order of sampling they would be others' scores."""
    samples = Samples(batch=batch())
    scoring = Scorer(reward=CountingReward(result({})), timers=PhaseTimer()).submit(samples)
    rows = samples.batch
    rows.batch["sample_index"] = torch.arange(ROWS)
    rows.reorder(torch.tensor([2, 0, 1]))
    assert add_scores(rows, [scoring]) == {"reward/num_failed": 0.0}
    assert rows.batch["scores"].tolist() == [0.5, 1.0, 0.0] != result({}).scores.tolist()


def test_scores_that_were_waited_for_are_not_added_again() -> None:
    """A source may have chosen rows of them, joined them with others, and changed which of them may train."""
    samples = Samples(batch=batch())
    scoring = Scorer(reward=CountingReward(result({})), timers=PhaseTimer()).submit(samples)
    assert samples.scored().batch["scores"].tolist() == [1.0, 0.0, 0.5]
    chosen = samples.scored().select_idxs([2])
    chosen.batch["valid"] = torch.tensor([False])
    assert scoring.add_to(chosen) == {"reward/num_failed": 0.0}
    assert chosen.batch["scores"].tolist() == [0.5] and chosen.batch["valid"].tolist() == [False]


def test_numbers_become_components_and_texts_do_not() -> None:
    rows = batch()
    Scorer(reward=CountingReward(result(EXTRA)), timers=PhaseTimer(), components=True).score_rows(rows)
    found = reward_components(dict(rows.batch.items()))
    assert {name: column.tolist() for name, column in found.items()} == {"correct": [1.0, 0.0, 1.0], "format": [1.0, 2.0, 0.5]}
    assert all(column.dtype == torch.float64 for column in found.values())


def test_components_are_kept_only_for_those_who_read_them() -> None:
    rows = batch()
    Scorer(reward=CountingReward(result(EXTRA)), timers=PhaseTimer()).score_rows(rows)
    assert reward_components(dict(rows.batch.items())) == {}


def test_a_row_without_the_number_is_named() -> None:
    extra = {"format": objects(1.0, None, 0.0)}
    with pytest.raises(RewardError, match=r"row 1: .*no 'format'.*Return 'format' always"):
        component(result(extra), "format")
    with pytest.raises(RewardError, match=r"row 2: .*nan 'format'"):
        component(result({"format": objects(1.0, 1.0, float("nan"))}), "format")


def test_rows_that_could_not_be_scored_have_zero() -> None:
    """Masked: not valid.  Scored zero: valid, and told apart by the number of failures."""
    extra = {"format": objects(1.0, None, 0.5)}
    assert component(result(extra, [True, False, True], 1), "format").tolist() == [1.0, 0.0, 0.5]
    assert component(result(extra, None, 1), "format").tolist() == [1.0, 0.0, 0.5]
    with pytest.raises(RewardError, match="row 0: "):
        component(result({"format": objects(None, None, 0.5)}, None, 1), "format")
    with pytest.raises(RewardError, match="row 0: "):
        component(result({"format": objects(None, None, 0.5)}, [True, False, True], 1), "format")
