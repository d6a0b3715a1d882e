"""Metrics of a batch against counts by hand; what is outside the mask must not show."""

from __future__ import annotations

import math

import pytest
import torch

from rlhub.algorithms.estimation import batch_metrics, metric_rows, spread
from rlhub.algorithms.statistics import Moments, batch_moments, row_moments

NAN = math.nan


def batch_of(*, values: bool = True, outside: float = NAN) -> dict[str, torch.Tensor]:
    """Prompts up to 3 tokens, responses up to 2; the third row's response is empty, the fourth has no valid score."""
    x = outside
    tensors = {
        "response_mask": torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]]),
        "response_length": torch.tensor([2, 1, 0, 2]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 1, 0, 0], [0, 1, 1, 1, 1]]),
        "finish_reason": torch.tensor([1, 0, 2, 0]),
        "valid": torch.tensor([True, True, True, False]),
        "scores": torch.tensor([1.0, 0.5, 0.0, -9.0]),
        "token_level_rewards": torch.tensor([[0.25, 1.0], [0.5, x], [x, x], [7e7, -7e7]]),
        "advantages": torch.tensor([[-1.0, 2.0], [0.5, x], [x, x], [7e7, -7e7]]),
        "returns": torch.tensor([[1.25, 1.0], [0.5, x], [x, x], [7e7, -7e7]]),
    }
    if values:
        tensors["values"] = torch.tensor([[3.0, 4.0], [5.0, x], [x, x], [7e7, -7e7]])
    return tensors | {"learn_mask": tensors["response_mask"] * tensors["valid"][:, None]}


EXPECTED = {
    "response_length/mean": 1.25,
    "response_length/max": 2.0,
    "response_length/min": 0.0,
    "response_length/clip_ratio": 1 / 4,
    "prompt_length/mean": 2.0,
    "prompt_length/max": 3.0,
    "prompt_length/min": 1.0,
    "critic/score/mean": 0.5,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "reward/mean": 0.5,
    "reward/std": math.sqrt((0.25 + 0 + 0.25) / 3),
    "critic/rewards/mean": 1.75 / 3,
    "critic/rewards/max": 1.25,
    "critic/rewards/min": 0.0,
    "critic/advantages/mean": 0.5,
    "critic/advantages/max": 2.0,
    "critic/advantages/min": -1.0,
    "critic/returns/mean": 2.75 / 3,
    "critic/returns/max": 1.25,
    "critic/returns/min": 0.5,
    "critic/values/mean": 4.0,
    "critic/values/max": 5.0,
    "critic/values/min": 3.0,
    "perf/total_num_tokens": 13.0,
    "actor/masked_samples": 2.0,
}


def measured(batch: dict[str, torch.Tensor]) -> dict[str, float]:
    return batch_metrics(metric_rows(batch, batch["valid"]))


@pytest.mark.parametrize("outside", [NAN, 0.0, 1e9])
def test_batch_metrics(outside: float) -> None:
    assert measured(batch_of(outside=outside)) == pytest.approx(EXPECTED)


def test_a_mask_that_lets_padding_through_shows() -> None:
    """The control: were the empty row's tokens counted, the metrics would tell."""
    batch = batch_of(outside=1e9)
    batch["response_mask"] = torch.ones(4, 2).long()
    assert measured(batch)["critic/advantages/max"] == 1e9


def test_a_score_that_is_not_valid_would_show() -> None:
    """The control: the fourth row's numbers are far outside the others'."""
    batch = batch_of()
    batch["valid"] = torch.ones(4, dtype=torch.bool)
    metrics = measured(batch)
    assert (metrics["critic/score/min"], metrics["critic/advantages/max"]) == (-9.0, pytest.approx(7e7))


def test_without_a_critic_there_are_no_values() -> None:
    metrics = measured(batch_of(values=False))
    assert metrics == pytest.approx({name: value for name, value in EXPECTED.items() if not name.startswith("critic/values")})


def test_a_batch_whose_responses_are_all_empty() -> None:
    batch = batch_of()
    batch["response_mask"] = torch.zeros(4, 2).long()
    metrics = measured(batch)
    assert not any(name.startswith(("critic/advantages", "critic/returns", "critic/values")) for name in metrics)
    assert metrics["critic/rewards/max"] == 0.0


def test_spread_takes_integers_and_skips_nothing_at_all() -> None:
    def moments(values: torch.Tensor) -> Moments:
        return batch_moments(row_moments(values, torch.ones_like(values)))

    assert spread("x", moments(torch.tensor([1, 2, 6]))) == {"x/mean": 3.0, "x/max": 6, "x/min": 1}
    assert spread("x", moments(torch.zeros(0))) == {}


def test_means_of_the_largest_floats_are_finite() -> None:
    """Against exact sums: float32 overflows with the second of them."""
    batch = batch_of()
    for name in ("advantages", "returns", "values", "token_level_rewards"):
        batch[name] = torch.full((4, 2), 3e38)
    batch["scores"] = torch.tensor([3e38, 3e38, -1e38, 0.0])
    metrics = measured(batch)
    assert all(map(math.isfinite, metrics.values())), metrics
    scores = [float(x) for x in batch["scores"][:3].double()]
    mean = math.fsum(scores) / 3
    assert metrics["reward/mean"] == metrics["critic/score/mean"] == pytest.approx(mean)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(math.fsum(((x - mean) / 1e38) ** 2 for x in scores) / 3) * 1e38)
    assert metrics["critic/rewards/max"] == pytest.approx(6e38)


def test_a_batch_without_any_valid_score_has_no_mean_reward() -> None:
    batch = batch_of()
    batch["valid"] = torch.zeros(4, dtype=torch.bool)
    assert all(map(math.isfinite, measured(batch).values())) and "reward/mean" not in measured(batch)


def test_metrics_are_bit_equal_when_ranks_compute_those_of_their_rows() -> None:
    batch, whole = batch_of(outside=1e9), measured(batch_of(outside=1e9))
    for ranks in ([[0, 1], [2, 3]], [[3, 1], [0], [2]], [[3], [2], [1], [0]]):
        order = torch.tensor([row for rows in ranks for row in rows]).argsort()
        parts = [metric_rows(part, part["valid"]) for part in ({n: c[rows] for n, c in batch.items()} for rows in ranks)]
        assert batch_metrics({name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}) == whole
