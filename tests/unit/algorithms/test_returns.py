"""Rewards to go: both ways of adding them, and long rows in float32; and reward whitening against a loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.returns import rewards_to_go, scan, time_first, whiten_rewards
from rlhub.algorithms.statistics import whiten
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_definition(gamma: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    rewards = torch.randn(5, 90, generator=generator, dtype=dtype)
    mask = (torch.rand(5, 90, generator=generator) < 0.7).long()
    mask[3] = 0
    got = rewards_to_go(torch.where(mask.bool(), rewards, torch.nan), mask, gamma)
    expected = torch.tensor(references.to_go(rewards.double().tolist(), mask.tolist(), gamma), dtype=torch.float64)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)
    assert got.is_contiguous()
    shifted = rewards_to_go(rewards.roll(1, 1), mask, gamma)  # the control: rewards a column late
    assert (shifted - got).abs().max() > 0.1


def test_without_discount_the_cumulative_sum_equals_the_scan_in_long_rows() -> None:
    """3072 dense float32 rewards, to a few 1e-6 of the largest sum."""
    rewards = torch.randn(3, 3072, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(rewards)
    quick, slow = rewards_to_go(rewards, mask, 1.0), scan(rewards.t(), time_first(mask, torch.float32), 1.0).t()
    exact = torch.tensor([math.fsum(row) for row in rewards.tolist()], dtype=torch.float64)
    for sums, tolerance in ((quick, 1e-7), (slow, 5e-6)):
        assert (sums[:, 0].double() - exact).abs().max() < tolerance * quick.abs().max()


whitening_cases = st.tuples(masks(), seeds, dtypes)


def slow_whitening(table: references.Table, mask: references.Mask) -> references.Table:
    kept = references.inside(table, mask)
    centre, spread = references.mean(kept), math.sqrt(references.variance(kept) + 1e-8)
    return [
        [(x - centre) / spread + centre if m else 0.0 for x, m in zip(row, keep, strict=True)]
        for row, keep in zip(table, mask, strict=True)
    ]


def check_whitening(function, case) -> None:
    mask, seed, dtype = case
    values = tensor(numbers(seed, mask, scale=3.0), dtype) + 2
    spread = (references.variance(references.inside(exact(values), mask)) + 1e-8) ** 0.5
    got = function(garbage(values, torch.tensor(mask)), torch.tensor(mask))
    assert_close(got, slow_whitening(exact(values), mask), amplification=5 / spread)


@few
@given(whitening_cases)
def test_whiten_rewards(case) -> None:
    check_whitening(whiten_rewards, case)


def test_shifting_the_mean_or_reading_padding_is_caught() -> None:
    assert catches(check_whitening, whiten, whitening_cases)
    assert catches(
        check_whitening,
        lambda values, mask: whiten_rewards(values.nan_to_num(), torch.ones_like(mask)) * mask,
        whitening_cases,
    )


def test_the_spread_becomes_one_and_the_mean_stays() -> None:
    rewards, mask = torch.tensor([[0.0, 4.0, 9.0], [0.0, 0.0, 2.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    whitened = whiten_rewards(rewards, mask)
    assert whitened[mask.bool()].mean().item() == pytest.approx(6 / 5)
    assert whitened[mask.bool()].var().item() == pytest.approx(1.0)
    assert whitened[0, 2] == 0.0


def test_equal_rewards_stay_what_they_are() -> None:
    rewards, mask = torch.full((2, 3), 0.1), torch.ones(2, 3)
    torch.testing.assert_close(whiten_rewards(rewards, mask), rewards)
