"""Masked reductions against loops; values outside the mask must not matter, NaN or not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms import masked as code
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

cases = st.tuples(masks(), seeds, dtypes)


def check_whiten(whiten, case) -> None:
    mask, seed, dtype = case
    values = tensor(numbers(seed, mask, scale=3.0), dtype)
    kept = references.inside(exact(values), mask)
    spread = (references.variance(kept) + 1e-8) ** 0.5
    assert_close(
        whiten(garbage(values, torch.tensor(mask)), torch.tensor(mask)),
        references.whiten(exact(values), mask),
        amplification=3 / spread,
    )


@few
@given(cases)
def test_whiten(case) -> None:
    check_whiten(code.whiten, case)


def test_whitening_over_padding_or_with_the_biased_variance_is_caught() -> None:
    def over_padding(values, mask):
        return code.masked(code.whiten(code.masked(values, mask), torch.ones_like(mask)), mask)

    def biased(values, mask):
        count = mask.sum()
        return code.whiten(values, mask) * (count / (count - 1).clamp(min=1)).sqrt()

    assert catches(check_whiten, over_padding, cases)
    assert catches(check_whiten, biased, cases)


def test_equal_values_whiten_to_nothing_even_in_float32() -> None:
    values = torch.full((64, 301), 1000.1)
    assert code.whiten(values, torch.ones_like(values)).abs().max() < 1e-6


@few
@given(cases)
def test_sum_and_mean(case) -> None:
    mask, seed, dtype = case
    values, keep = tensor(numbers(seed, mask, scale=3.0), dtype), torch.tensor(mask)
    noisy, rows = garbage(values, keep), exact(values)
    kept = references.inside(rows, mask)
    assert_close(code.masked_sum(noisy, keep), sum(kept))
    assert_close(code.masked_mean(noisy, keep), sum(kept) / (len(kept) + 1e-8))
    by_row = [references.inside([row], [m]) for row, m in zip(rows, mask, strict=True)]
    assert_close(code.masked_sum(noisy, keep, dim=1), [sum(row) for row in by_row])
    assert_close(code.masked_mean(noisy, keep, dim=1), [sum(row) / (len(row) + 1e-8) for row in by_row])


def test_no_gradient_flows_to_what_is_masked() -> None:
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]], requires_grad=True)
    (code.masked_sum(values, torch.tensor([[1, 0], [0, 1]])) * 3).backward()
    assert values.grad is not None and values.grad.tolist() == [[3.0, 0.0], [0.0, 3.0]]


def test_an_empty_mask_and_a_single_value_are_finite() -> None:
    values, nothing, one = torch.tensor([[5.0, 7.0]]), torch.tensor([[0, 0]]), torch.tensor([[0, 1]])
    assert code.masked_mean(values, nothing) == 0
    assert code.whiten(values, nothing).tolist() == [[0.0, 0.0]]
    assert code.whiten(values, one).tolist() == [[0.0, 0.0]]
