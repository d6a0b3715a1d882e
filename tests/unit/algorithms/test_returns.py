"""Rewards to go: both ways of adding them, and long rows in float32."""

from __future__ import annotations

import math

import pytest
import torch

from rlhub.algorithms.returns import rewards_to_go, scan, time_first
from tests.unit.algorithms import references


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
