"""pass@k against brute force over all subsets, and per-source metrics against hand counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhub.config.sections.reward import RewardModelConfig
from rlhub.config.sections.rollout import ValSamplingConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardFailure, RewardOutcome
from rlhub.rewards.naive import OUTCOMES, NaiveManager
from rlhub.trainer.ppo.validation import (
    Validator,
    correctness,
    pass_at_k,
    pass_metrics,
    powers_up_to,
    validation_metrics,
)
from rlhub.utils.timing import PhaseTimer
from tests.unit.rewards.test_managers import Letters, make_batch, parts


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_powers_end_with_the_number_of_samples() -> None:
    assert powers_up_to(1) == [1]
    assert powers_up_to(6) == [1, 2, 4, 6]
    assert powers_up_to(8) == [1, 2, 4, 8]


def test_metrics_per_source() -> None:
    correct = np.array([[True, False], [False, False], [True, True]])
    metrics = validation_metrics(correct, correct.ravel().astype(float), np.full(6, 3.0), ["a", "a", "b"])
    assert metrics["val/pass@1"] == pytest.approx(0.5)
    assert metrics["val/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val/a/pass@1"] == pytest.approx(0.25)
    assert metrics["val/b/pass@1"] == 1.0
    assert pass_metrics("x", correct) == {"x/pass@1": pytest.approx(0.5), "x/pass@2": pytest.approx(2 / 3)}


def test_the_scorers_own_accuracy_wins_over_the_score() -> None:
    scores = np.array([0.9, -0.1, 0.8])
    assert correctness({}, scores).tolist() == [True, False, True]
    assert correctness({"acc": np.array([0, 1, None], dtype=object)}, scores).tolist() == [False, True, True]


# Samples without a valid score


def slow_pass_at_k(correct: list[list[bool]], valid: list[list[bool]], k: int) -> float | None:
    """Over all subsets of each prompt's valid samples; None if no prompt has so many."""
    shares = []
    for row, scored in zip(correct, valid, strict=True):
        subsets = list(combinations([c for c, v in zip(row, scored, strict=True) if v], k))
        if subsets:
            shares.append(sum(map(any, subsets)) / len(subsets))
    return sum(shares) / len(shares) if shares else None


@pytest.mark.parametrize("seed", range(20))
def test_pass_at_k_counts_valid_samples_alone(seed: int) -> None:
    """A prompt with fewer than k of them says nothing of k tries, and is left out of pass@k."""
    random = np.random.default_rng(seed)
    shape = (int(random.integers(1, 6)), int(random.integers(1, 6)))
    correct, valid = random.random(shape) < 0.4, random.random(shape) < random.choice([0.1, 0.6, 1.0])
    metrics = pass_metrics("x", correct, valid)
    for k in powers_up_to(shape[1]):
        expected = slow_pass_at_k(correct.tolist(), valid.tolist(), k)
        assert metrics.get(f"x/pass@{k}") == (None if expected is None else pytest.approx(expected)), k


def test_invalid_samples_move_no_mean_and_a_failed_score_would_show() -> None:
    correct, valid = np.array([[True, False], [False, True]]), np.array([[True, False], [False, True]])
    scores, lengths = np.array([3e38, 7.0, 7.0, 3e38], dtype=np.float32), np.full(4, 3.0)
    metrics = validation_metrics(correct, scores, lengths, ["a", "b"], valid)
    assert metrics["val/pass@1"] == metrics["val/a/pass@1"] == metrics["val/b/pass@1"] == 1.0
    assert metrics["val/reward/mean"] == pytest.approx(3e38) and "val/pass@2" not in metrics
    nothing = validation_metrics(correct, scores, lengths, ["a", "a"], np.zeros((2, 2), dtype=bool))
    assert set(nothing) == {"val/response_length/mean", "val/num_prompts"}


class Given:
    """Validation samples that are there already."""

    def __init__(self, samples: int) -> None:
        self.config: Any = SimpleNamespace(val_kwargs=ValSamplingConfig(n=samples))

    def validation(self, prompts: DataProto) -> DataProto:
        return prompts


def given(texts: list[str]) -> DataProto:
    batch = make_batch(texts)
    batch.batch["response_length"] = batch.batch["response_mask"].sum(1)
    batch.batch["finish_reason"] = torch.zeros(len(texts), dtype=torch.int64)
    batch.non_tensor_batch["raw_prompt"] = object_array(["?"] * len(texts))
    return batch


def validated(batches: list[DataProto], table: dict[str, Any], **settings: Any) -> Any:
    scoring = RewardModelConfig(**({"on_error": "mask", "max_error_rate": 1.0} | settings))
    reward = NaiveManager(replace(parts(table), on_error=scoring.on_error, max_error_rate=scoring.max_error_rate))
    return Validator(batches, Given(2), reward, Letters(), PhaseTimer(), 8, scoring)()


def test_failed_rewards_are_excluded_and_counted_over_all_batches() -> None:
    report = validated([given(["a", "a", "x", "b"]), given(["b", "b", "x", "x"])], {"a": 1.0, "b": 0.0})
    assert report.metrics["val/pass@1"] == pytest.approx((1 + 0 + 0) / 3)
    assert report.metrics["val/pass@2"] == pytest.approx((1 + 0) / 2)
    assert report.metrics["val/reward/mean"] == pytest.approx(2 / 5)
    counted = {"val/reward/num_failed": 3.0, "val/reward/num_failed/raised": 3.0, "val/reward/failed_share": 3 / 8}
    assert {name: report.metrics[name] for name in counted} == counted
    assert [row.score for row in report.samples] == [1.0, 1.0, None, 0.0, 0.0, 0.0, None, None]


def test_the_policy_for_failures_is_that_of_training() -> None:
    zero = validated([given(["a", "x"])], {"a": 1.0}, on_error="zero").metrics
    assert (zero["val/pass@1"], zero["val/reward/mean"], zero["val/reward/num_failed"]) == (0.5, 0.5, 1.0)
    with pytest.raises(RewardError, match="on_error=fail"):
        validated([given(["a", "x"])], {"a": 1.0}, on_error="fail")
    with pytest.raises(RewardError, match="max_error_rate=0.4"):
        validated([given(["a", "x"])], {"a": 1.0}, max_error_rate=0.4)


def scored_by_workflows() -> DataProto:
    """Rewards of the workflows' own; the reward that one of them asked for failed."""
    batch = given(["a", "a", "a", "a"])
    batch.batch["scores"] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    failure = RewardOutcome(error=RewardFailure(kind="raised", message="asked in vain"))
    batch.non_tensor_batch[OUTCOMES] = object_array([None, None, None, failure])
    return batch


def test_a_reward_that_failed_inside_an_episode_follows_the_same_policy() -> None:
    masked = validated([scored_by_workflows()], {}).metrics
    assert (masked["val/pass@1"], masked["val/reward/num_failed"]) == (0.5, 1.0)
    assert masked["val/reward/mean"] == pytest.approx(2 / 3)
    zero = validated([scored_by_workflows()], {}, on_error="zero").metrics
    assert (zero["val/pass@1"], zero["val/pass@2"], zero["val/reward/num_failed"]) == (0.5, 0.5, 1.0)
    assert zero["val/reward/mean"] == 0.5
    with pytest.raises(RewardError, match=r"(?s)asked in vain.*on_error=fail"):
        validated([scored_by_workflows()], {}, on_error="fail")
