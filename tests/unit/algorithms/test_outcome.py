"""Outcomes in rows wide enough for every path through them: few rewards, many, and the columns that fill no block."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from rlhub.algorithms.outcome import BLOCK, on_tokens, outcome_rewards

WIDTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7)
DTYPES = (torch.int64, torch.bool, torch.float32, torch.float64)


def batch(width: int, share: float, dtype: torch.dtype, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """300 rows, that share of the rewards not 0, NaN where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.rand(300, width, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = draw() < 0.8
    rewards = torch.where(draw() < share, draw() - 0.5, 0.0).to(dtype)
    return torch.where(mask, rewards, torch.nan), mask


def loops(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = zip(rewards.double().tolist(), mask.tolist(), strict=True)
    return torch.tensor([math.fsum(x for x, m in zip(row, keep, strict=True) if m) for row, keep in rows], dtype=torch.float64)


@functools.cache
def summed(width: int, share: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch and its sums, which no test changes."""
    rewards, mask = batch(width, share, dtype)
    return rewards, mask, loops(rewards, mask)


@pytest.mark.parametrize("mask_dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.0, 0.004, 1.0])
def test_sums(width: int, share: float, mask_dtype: torch.dtype) -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        rewards, mask, expected = summed(width, share, dtype)
        got = outcome_rewards(rewards, mask.to(mask_dtype))
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(1, width * share) ** 0.5)
        strided = rewards.t().contiguous().t()
        torch.testing.assert_close(outcome_rewards(strided, mask.to(mask_dtype)), got, rtol=0, atol=tolerance)


def test_few_rewards_are_added_in_float64() -> None:
    """Equal rewards at other places are equal outcomes, bit for bit; float32 would part them."""
    values = torch.tensor([0.1, 0.7, 1e-3, 0.2])
    rewards = torch.zeros(24, 40 * BLOCK)
    generator = torch.Generator().manual_seed(0)
    for row in rewards:
        place = torch.randint(0, 40, (1,), generator=generator) * BLOCK
        row[place : place + 4] = values[torch.randperm(4, generator=generator)]
    outcome = outcome_rewards(rewards, torch.ones_like(rewards))
    assert len(outcome.unique()) == 1 and outcome[0] == math.fsum(values.tolist())
    one_by_one = sum(rewards.unbind(1))  # the control
    assert isinstance(one_by_one, torch.Tensor) and len(one_by_one.unique()) > 1


def test_no_reward_is_too_small_or_cancels() -> None:
    rewards = torch.zeros(2, 2 * BLOCK)
    rewards[0, 3], rewards[1, 5], rewards[1, 6] = 1e-40, -1.0, 1.0
    rewards[1, 70] = -(2.0**-30)
    assert outcome_rewards(rewards, torch.ones_like(rewards)).tolist() == [float(rewards[0, 3]), -(2.0**-30)]


@pytest.mark.parametrize("mask_dtype", DTYPES)
def test_on_tokens(mask_dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]]).to(mask_dtype)
    expected = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0], [-2.0, -2.0, 0.0]])
    kept_mask = mask.clone()
    assert torch.equal(on_tokens(torch.tensor([0.5, 7.0, -2.0]).double(), mask, torch.float32), expected)
    broken = on_tokens(torch.tensor([0.5, torch.nan, -2.0]), mask, torch.float32)
    assert torch.equal(broken, expected), "a row without tokens is 0 whatever its number is"
    assert torch.equal(mask, kept_mask)
    for dtype in (torch.float64, torch.bfloat16):
        numbers = torch.tensor([0.5, torch.inf, -2.0], dtype=torch.float64)
        assert torch.equal(on_tokens(numbers, mask, dtype), expected.to(dtype))
