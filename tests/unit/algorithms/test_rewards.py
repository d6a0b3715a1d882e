"""Reward whitening against a loop; values outside the mask must not matter, NaN or not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms import masked as masked_module
from rlhub.algorithms import rewards as code
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

cases = st.tuples(masks(), seeds, dtypes)


def reference(table: references.Table, mask: references.Mask) -> references.Table:
    kept = references.inside(table, mask)
    centre, spread = references.mean(kept), math.sqrt(references.variance(kept) + 1e-8)
    return [
        [(x - centre) / spread + centre if m else 0.0 for x, m in zip(row, keep, strict=True)]
        for row, keep in zip(table, mask, strict=True)
    ]


def check(whiten_rewards, case) -> None:
    mask, seed, dtype = case
    values = tensor(numbers(seed, mask, scale=3.0), dtype) + 2
    spread = (references.variance(references.inside(exact(values), mask)) + 1e-8) ** 0.5
    got = whiten_rewards(garbage(values, torch.tensor(mask)), torch.tensor(mask))
    assert_close(got, reference(exact(values), mask), amplification=5 / spread)


@few
@given(cases)
def test_whiten_rewards(case) -> None:
    check(code.whiten_rewards, case)


def test_shifting_the_mean_or_reading_padding_is_caught() -> None:
    assert catches(check, masked_module.whiten, cases)
    assert catches(check, lambda values, mask: code.whiten_rewards(values.nan_to_num(), torch.ones_like(mask)) * mask, cases)


def test_the_spread_becomes_one_and_the_mean_stays() -> None:
    rewards, mask = torch.tensor([[0.0, 4.0, 9.0], [0.0, 0.0, 2.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    whitened = code.whiten_rewards(rewards, mask)
    assert masked_module.masked_mean(whitened, mask).item() == pytest.approx(6 / 5)
    assert whitened[mask.bool()].var().item() == pytest.approx(1.0)
    assert whitened[0, 2] == 0.0


def test_equal_rewards_stay_what_they_are() -> None:
    rewards, mask = torch.full((2, 3), 0.1), torch.ones(2, 3)
    torch.testing.assert_close(code.whiten_rewards(rewards, mask), rewards)
