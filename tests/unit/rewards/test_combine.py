"""Several scorers, one reward: against sums in python floats, with weights, failures and what counts as correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.rewards import RewardFailure, RewardOutcome
from rlhub.rewards.base import RewardResult
from rlhub.rewards.combine import CombinedManager, PartScores, RewardPart, accuracy, outcomes_of
from rlhub.rewards.managers import NaiveManager
from tests.unit.rewards.test_managers import WIDTH, make_batch, parts, tokens_of

TEXTS = ["ab", "abc", "d", "abcdef"]
FUNCTION = {"ab": 1.0, "abc": 0.0, "d": {"score": 1.0, "acc": 0.0}, "abcdef": 0.25}
MODEL = [0.5, -2.0, 3.0, 0.125]
JUDGE = [7.0, 2.0, 10.0, 0.0]


def outcome(score: float | None) -> RewardOutcome:
    if score is None:
        return RewardOutcome(error=RewardFailure(kind="bad_value", message="no number"))
    return RewardOutcome(score=score)


def part(name: str, weight: float, scores: list[float | None], **metrics: float) -> RewardPart:
    found = PartScores(outcomes=list(map(outcome, scores)), metrics=metrics)
    return RewardPart(name=name, weight=weight, start=lambda batch: lambda: found)


def manager(*others: RewardPart, weight: float = 1.0, table: dict[str, Any] | None = None, **settings: Any) -> CombinedManager:
    values: dict[str, Any] = {"on_error": "mask", "max_error_rate": 1.0} | settings
    function = None if weight == 0 else NaiveManager(parts(FUNCTION if table is None else table, **values))
    return CombinedManager(function=function, function_weight=weight, parts=others, **values)


def test_the_reward_is_the_weighted_sum_on_the_last_token() -> None:
    batch = make_batch(TEXTS)
    result = manager(part("model", 0.5, MODEL), part("judge", -0.1, JUDGE, seen=4.0), weight=2.0)(batch)
    for row, (text, function, model, judge) in enumerate(zip(TEXTS, (1.0, 0.0, 1.0, 0.25), MODEL, JUDGE, strict=True)):
        expected = 2.0 * function + 0.5 * model - 0.1 * judge
        line = [0.0] * WIDTH
        line[len(text) - 1] = expected
        assert result.scores[row].item() == pytest.approx(expected, abs=1e-6)
        assert tokens_of(result, batch)[row].tolist() == pytest.approx(line, abs=1e-6)
    assert result.scores.dtype == torch.float32
    assert result.valid.tolist() == [True] * 4
    assert result.extra["function"].tolist() == [1.0, 0.0, 1.0, 0.25]
    assert result.extra["model"].tolist() == MODEL and result.extra["judge"].tolist() == JUDGE
    means = {name: result.metrics[f"reward/{name}"] for name in ("function", "model", "judge")}
    assert means == {"function": 2.25 / 4, "model": sum(MODEL) / 4, "judge": sum(JUDGE) / 4}
    assert result.metrics["seen"] == 4.0 and result.metrics["reward/num_failed"] == 0.0


@pytest.mark.parametrize("factor", [-1.0, 0.0, 3.0])
def test_weights_scale_the_reward_linearly(factor: float) -> None:
    batch = make_batch(TEXTS)
    once = manager(part("model", 1.0, MODEL), weight=0)(batch).scores
    scaled = manager(part("model", factor, MODEL), weight=0)(batch)
    assert torch.equal(scaled.scores, factor * once) and torch.equal(tokens_of(scaled, batch).sum(1), factor * once)
    assert scaled.extra["model"].tolist() == MODEL  # what is logged is the part's own score


def test_without_a_function_nothing_of_it_is_run_or_logged() -> None:
    result = manager(part("model", 1.0, MODEL), weight=0)(make_batch(TEXTS))
    assert result.scores.tolist() == MODEL and "acc" not in result.extra
    assert not any("function" in name for name in [*result.extra, *result.metrics])
    manager(part("model", 1.0, MODEL), weight=0).close()


def test_correct_is_what_the_function_says() -> None:
    """Row 2 has an "acc" of its own, row 1 a learned reward of 90 and a wrong answer."""
    extra = manager(part("model", 1.0, [0.0, 90.0, 90.0, 0.0]))(make_batch(TEXTS)).extra
    assert extra["acc"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert accuracy(None, np.array([0.5, 0.51])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("on_error", "valid", "second"), [("mask", False, 0.0), ("zero", True, 1.0)])
def test_a_failed_part_masks_the_row_or_counts_zero(on_error: str, valid: bool, second: float) -> None:
    combined = manager(part("judge", 1.0, [5.0, None]), table={"ab": 1.0}, on_error=on_error)
    batch = make_batch(["ab", "ab"])
    result = combined(batch)
    assert result.valid.tolist() == [True, valid] and result.scores.tolist() == [6.0, second]
    assert tokens_of(result, batch).sum(1).tolist() == [6.0, second]
    assert result.extra["judge"].tolist() == [5.0, None] and result.metrics["reward/judge"] == 5.0
    assert (result.metrics["reward/num_failed"], result.metrics["reward/num_failed/bad_value"]) == (1.0, 1.0)
    assert result.metrics["reward/failed_share"] == 0.5


def test_failures_of_several_scorers_add_up() -> None:
    combined = manager(part("model", 1.0, [1.0, None, 1.0]), part("judge", 1.0, [1.0, 1.0, None]), table={"a": 1.0})
    result = combined(make_batch(["x", "a", "a"]))
    assert result.valid.tolist() == [False, False, False]
    assert result.metrics["reward/num_failed"] == 3.0 and result.metrics["reward/num_failed/bad_value"] == 2.0
    assert result.extra["function"].tolist() == [None, 1.0, 1.0]


def test_too_many_failures_stop_the_run_and_name_the_part() -> None:
    with pytest.raises(RewardError, match=r"the judge part of the reward: .*1 of 2 .*(?s:.)*on_error=fail"):
        manager(part("judge", 1.0, [5.0, None]), table={"ab": 1.0}, on_error="fail")(make_batch(["ab", "ab"]))
    with pytest.raises(RewardError, match=r"the model part.*(?s:.)*1 of 2 = 50% is more than reward_model.max_error_rate=0.4"):
        manager(part("model", 1.0, [5.0, None]), table={"ab": 1.0}, max_error_rate=0.4)(make_batch(["ab", "ab"]))


def test_a_reward_models_scores_must_be_finite_numbers() -> None:
    found = outcomes_of(torch.tensor([1.5, float("nan"), float("inf"), -2.0]))
    assert [one.error is None for one in found] == [True, False, False, True]
    assert (found[0].score, found[3].score) == (1.5, -2.0) and "nan" in found[1].error.message  # type: ignore[union-attr]


def test_a_manager_of_ones_own_may_score_tokens() -> None:
    """Its scores stay where it puts them; those of a reward model are added on the last token that the model wrote."""

    class Tokens:
        def __call__(self, batch: DataProto) -> RewardResult:
            tokens = 0.25 * batch.batch["response_mask"].float()
            valid = torch.tensor([True, False])
            return RewardResult(token_level_scores=tokens, scores=tokens.sum(1), valid=valid, extra={}, metrics={})

        def close(self) -> None: ...

    combined = manager(part("model", 0.5, [2.0, 4.0]), weight=2.0)
    combined.function = Tokens()
    result = combined(make_batch(["abc", "ab"]))
    assert result.token_level_scores is not None
    assert result.token_level_scores.tolist() == [[0.5, 0.5, 1.5, 0, 0, 0], [0.0] * WIDTH]
    assert result.scores.tolist() == [2.5, 0.0]


def test_all_start_before_one_is_waited_for() -> None:
    """A function with processes of its own starts first, and runs beside the others."""
    order: list[str] = []

    class Background:
        def start(self, batch: DataProto) -> Callable[[], RewardResult]:
            order.append("function started")
            return lambda: (order.append("function waited"), NaiveManager(parts({"ab": 1.0}))(batch))[1]

        def __call__(self, batch: DataProto) -> RewardResult:
            raise AssertionError("its rows are not brought here")

        def close(self) -> None: ...

    def start(batch: DataProto) -> Callable[[], PartScores]:
        order.append("model started")
        return lambda: (order.append("model waited"), PartScores(outcomes=[outcome(1.0)]))[1]

    combined = manager(RewardPart(name="model", weight=1.0, start=start))
    combined.function = Background()
    assert combined(make_batch(["ab"])).scores.tolist() == [2.0]
    assert order == ["function started", "model started", "function waited", "model waited"]


def test_parts_are_started_before_the_function_and_waited_for_after_it() -> None:
    order: list[str] = []

    def start(batch: DataProto) -> Callable[[], PartScores]:
        order.append("started")
        return lambda: (order.append("waited"), PartScores(outcomes=[outcome(1.0)]))[1]

    combined = manager(RewardPart(name="model", weight=1.0, start=start), table={"ab": 1.0})
    assert combined.function is not None
    function = combined.function
    combined.function = lambda batch: (order.append("function"), function(batch))[1]  # type: ignore[assignment]
    combined(make_batch(["ab"]))
    assert order == ["started", "function", "waited"]


def test_a_weighted_sum_beyond_float32_is_a_failure_and_no_infinite_reward() -> None:
    def made(on_error: str) -> RewardResult:
        combined = manager(part("model", 10.0, [1e38, 1.0]), table={"ab": 1.0}, on_error=on_error)
        return combined(make_batch(["ab", "ab"]))

    with pytest.raises(RewardError, match=r"row 0: .*beyond float32.*reward_model"):
        made("fail")
    with pytest.raises(RewardError, match=r"row 0: .*beyond float32"):
        made("mask")
