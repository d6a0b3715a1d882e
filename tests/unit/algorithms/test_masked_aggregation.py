"""Aggregation against the definition of each mean, and the law: shares over any cut of a step sum to the step's loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.masked import Denominators, aggregate
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]
FACTOR = 13.0
cases = st.tuples(masks(), seeds, dtypes, st.sampled_from(MODES), st.lists(st.integers(0, 2), min_size=6, max_size=6))


def counts(mask: torch.Tensor) -> Denominators:
    return Denominators(tokens=float(mask.sum()), sequences=float(mask.any(1).sum()), scale=FACTOR)


def check(aggregation, case) -> None:
    """Each micro-batch has its own padding; the sum of the shares is the whole."""
    mask, seed, dtype, mode, part_of_row = case
    keep = torch.tensor(mask)
    loss = garbage(tensor(numbers(seed, mask, scale=4.0), dtype), keep)
    total = torch.zeros((), dtype=dtype)
    for part in range(3):
        rows = [i for i in range(len(mask)) if part_of_row[i] == part]
        if rows:
            padded = torch.nn.functional.pad
            total = total + aggregation(
                padded(loss[rows], (0, part), value=float("nan")), padded(keep[rows], (0, part)), mode, counts(keep)
            )
    assert_close(total, references.aggregate(exact(loss), mask, mode, FACTOR))


@few
@given(cases)
def test_shares_of_any_cut_sum_to_the_definition(case) -> None:
    check(aggregate, case)


def test_denominators_of_the_micro_batch_are_caught() -> None:
    assert catches(check, lambda loss, mask, mode, _: aggregate(loss, mask, mode, counts(mask)), cases)


def test_counting_empty_rows_or_the_padded_width_is_caught() -> None:
    def all_rows(loss, mask, mode, denominators):
        return aggregate(loss, mask, mode, dataclasses.replace(denominators, sequences=denominators.sequences + 1))

    def padded_width(loss, mask, mode, denominators):
        return aggregate(loss, mask, mode, dataclasses.replace(denominators, scale=mask.shape[1]))

    assert catches(check, all_rows, cases)
    assert catches(check, padded_width, cases)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_differs_from_the_others_and_an_empty_step_is_zero(mode: str) -> None:
    loss, mask = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    hand = {
        "token-mean": 15 / 4,
        "seq-mean-token-sum": 15 / 2,
        "seq-mean-token-mean": (7 / 3 + 8) / 2,
        "seq-mean-token-sum-norm": 15 / 2 / FACTOR,
        "token-sum": 15.0,
    }
    assert aggregate(loss, mask, mode, counts(mask)).item() == pytest.approx(hand[mode])
    assert aggregate(loss, mask * 0, mode, counts(mask * 0)).item() == 0


def test_an_unknown_mode_names_the_known_ones() -> None:
    mask = torch.ones(1, 1)
    with pytest.raises(ValueError, match="no loss aggregation 'mean'; known: token-mean, .*token-sum"):
        aggregate(mask, mask, "mean", counts(mask))


def check_gradient(aggregation, case) -> None:
    """Each token's factor, from the definition: raising one token's loss by h raises the mean by h times its factor."""
    mask, seed, dtype, mode, _ = case
    keep = torch.tensor(mask)
    loss = garbage(tensor(numbers(seed, mask, scale=4.0), dtype), keep).requires_grad_()
    total = aggregation(loss, keep, mode, counts(keep))
    (found,) = torch.autograd.grad(total, loss)
    rows = sum(map(any, mask))
    factors = {
        "token-mean": [1 / max(sum(map(sum, mask)), 1)] * len(mask),
        "token-sum": [1.0] * len(mask),
        "seq-mean-token-sum": [1 / max(rows, 1)] * len(mask),
        "seq-mean-token-mean": [1 / max(rows * sum(row), 1) for row in mask],
        "seq-mean-token-sum-norm": [1 / max(rows, 1) / FACTOR] * len(mask),
    }[mode]
    assert_close(found, [[factor * m for m in row] for factor, row in zip(factors, mask, strict=True)])


@few
@given(cases)
def test_gradients_and_nothing_from_masked_garbage(case) -> None:
    check_gradient(aggregate, case)


def test_a_mean_over_the_padded_width_is_caught_in_the_gradient() -> None:
    def padded(loss, mask, mode, denominators):
        return torch.where(mask.bool(), loss, torch.zeros_like(loss)).mean()

    assert catches(check_gradient, padded, cases)


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_of_padding_gives_nothing_and_can_be_stepped_over(mode: str) -> None:
    """A rank without rows left makes a pass over a row of padding: its share is 0 and its gradient exists and is 0."""
    loss = torch.full((1, 3), float("nan"), requires_grad=True)
    share = aggregate(loss, torch.zeros(1, 3).long(), mode, Denominators(tokens=4.0, sequences=2.0, scale=FACTOR))
    share.backward()
    assert share.item() == 0 and loss.grad is not None and loss.grad.count_nonzero() == 0
