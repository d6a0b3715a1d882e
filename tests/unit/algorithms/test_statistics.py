"""Statistics of a batch out of its rows' numbers: bit-equal however the rows are cut, and close to exact sums."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhub.algorithms.masked import masked
from rlhub.algorithms.mismatch import added, mismatch_rows, mismatch_sums, staleness_rows, staleness_sums
from rlhub.algorithms.statistics import (
    SUM,
    Moments,
    batch_moments,
    masked_total,
    pairwise_sum,
    row_moments,
    row_sums,
    whiten,
    whitened,
)
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

cases = st.tuples(masks(), seeds, dtypes)


def check_whiten(function, case) -> None:
    mask, seed, dtype = case
    values = tensor(numbers(seed, mask, scale=3.0), dtype)
    kept = references.inside(exact(values), mask)
    spread = (references.variance(kept) + 1e-8) ** 0.5
    assert_close(
        function(garbage(values, torch.tensor(mask)), torch.tensor(mask)),
        references.whiten(exact(values), mask),
        amplification=3 / spread,
    )


@few
@given(cases)
def test_whiten(case) -> None:
    check_whiten(whiten, case)


def test_whitening_over_padding_or_with_the_biased_variance_is_caught() -> None:
    def over_padding(values, mask):
        return masked(whiten(masked(values, mask), torch.ones_like(mask)), mask)

    def biased(values, mask):
        count = mask.sum()
        return whiten(values, mask) * (count / (count - 1).clamp(min=1)).sqrt()

    assert catches(check_whiten, over_padding, cases)
    assert catches(check_whiten, biased, cases)


def test_equal_values_whitento_nothing_even_in_float32() -> None:
    values = torch.full((64, 301), 1000.1)
    assert whiten(values, torch.ones_like(values)).abs().max() < 1e-6


def test_an_empty_mask_and_a_single_value_are_finite() -> None:
    values, nothing, one = torch.tensor([[5.0, 7.0]]), torch.tensor([[0, 0]]), torch.tensor([[0, 1]])
    assert whiten(values, nothing).tolist() == whiten(values, one).tolist() == [[0.0, 0.0]]
    empty = batch_moments(row_moments(values, nothing))
    assert (empty.count, empty.total, empty.mean, empty.squares, empty.lowest, empty.highest) == (0, 0, 0, 0, math.inf, -math.inf)
    none = batch_moments(row_moments(values[:0], nothing[:0]))
    assert (none.count, none.mean, none.highest) == (0, 0, -math.inf) and masked_total(values[:0], nothing[:0]) == 0


# Against exact sums


@few
@given(st.tuples(masks(max_rows=40, max_width=40), seeds, st.sampled_from([0.0, 1e4])))
def test_sums_and_moments_are_exact_to_a_few_bits(case) -> None:
    mask, seed, offset = case
    values, keep = tensor(numbers(seed, mask, scale=3.0), torch.float32) + offset, torch.tensor(mask)
    kept = references.inside(exact(values), mask)
    moments = batch_moments(row_moments(garbage(values, keep), keep))
    mean = math.fsum(kept) / max(len(kept), 1)
    assert moments.count == len(kept)
    assert moments.total.item() == pytest.approx(math.fsum(kept), rel=1e-12, abs=1e-12)
    assert moments.mean.item() == pytest.approx(mean, rel=1e-12, abs=1e-12)
    assert moments.squares.item() == pytest.approx(math.fsum((x - mean) ** 2 for x in kept), rel=1e-12, abs=1e-12)
    assert (moments.lowest.item(), moments.highest.item()) == (min(kept, default=math.inf), max(kept, default=-math.inf))
    assert masked_total(garbage(values, keep), keep).item() == moments.total.item()


def test_squares_about_zero_would_lose_the_spread_of_large_values() -> None:
    """The control of the formula: 1e-3 about 1e6, where mean of squares less square of mean is rounding."""
    values = 1e6 + 1e-3 * torch.rand(20, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    keep, kept = torch.ones(20, 30), [x for row in values.tolist() for x in row]
    spread = math.fsum((x - math.fsum(kept) / 600) ** 2 for x in kept)
    assert batch_moments(row_moments(values, keep)).squares.item() == pytest.approx(spread, rel=1e-9)
    assert masked_total(values.square(), keep).item() - masked_total(values, keep).item() ** 2 / 600 != pytest.approx(
        spread, rel=0.01
    )


# However the rows are cut


def cut(rows: int, parts: int, seed: int) -> list[list[int]]:
    """The rows over `parts` ranks, in random order on each; the parts in random order too."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return [order[part::parts] for part in range(parts)]


def over_ranks(function: Callable[..., Tensor], columns: list[Tensor], parts: list[list[int]]) -> Tensor:
    """What ranks with other paddings compute of their rows, put in the global order of the rows."""
    pieces = []
    for more, rows in enumerate(parts):
        pad = [torch.nn.functional.pad(column[rows], (0, more)) if column.dim() == 2 else column[rows] for column in columns]
        pieces.append(function(*pad))
    return torch.cat(pieces)[torch.tensor([row for rows in parts for row in rows]).argsort()]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype == torch.float64 and torch.equal(a.view(torch.int64), b.view(torch.int64))


def bits(moments: Moments) -> list[str]:
    return [float(getattr(moments, name)).hex() for name in Moments.__slots__]


splits = st.tuples(seeds, st.sampled_from([1, 2, 4, 8]), st.integers(8, 50), st.integers(1, 70), dtypes)


def columns_of(seed: int, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log pi, log mu, mask and ages."""
    generator = torch.Generator().manual_seed(seed)
    pi, noise = (torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    mask = torch.rand(rows, width, generator=generator) < 0.7
    return pi * 10.0, pi * 10.0 + 0.1 * noise, mask, torch.randint(0, 12, (rows, width), generator=generator)


@few
@given(splits)
def test_moments_and_whitening_are_bit_equal_over_every_split(case) -> None:
    seed, parts, rows, width, dtype = case
    values, _, mask, _ = columns_of(seed, rows, width, dtype)
    ranks = cut(rows, parts, seed)
    whole = row_moments(values, mask)
    gathered = over_ranks(row_moments, [values, mask], ranks)
    assert same_bits(gathered, whole) and bits(batch_moments(gathered)) == bits(batch_moments(whole))
    expected, moments = whiten(values, mask), batch_moments(gathered)
    for mine in ranks:
        assert torch.equal(whitened(values[mine], mask[mine], moments), expected[mine])


@few
@given(splits)
def test_mismatch_sums_are_bit_equal_over_every_split(case) -> None:
    seed, parts, rows, width, dtype = case
    pi, mu, mask, ages = columns_of(seed, rows, width, dtype)
    ranks = cut(rows, parts, seed)
    whole = {**mismatch_sums(pi, mu, mask), **staleness_sums(pi, mu, mask, ages)}
    per_row = {**mismatch_rows(pi, mu, mask), **staleness_rows(pi, mu, mask, ages)}
    for name, column in per_row.items():
        gathered = over_ranks(
            lambda *c, name=name: {**mismatch_rows(*c[:3]), **staleness_rows(*c)}[name], [pi, mu, mask, ages], ranks
        )
        assert same_bits(gathered, column), name
        assert same_bits(added({name: gathered})[name], whole[name]), name


def test_sums_that_every_rank_adds_up_itself_are_not() -> None:
    """The control: 64 rows over 2, 4 and 8 ranks, in ten ways each."""
    values, _, mask, _ = columns_of(3, 64, 50, torch.float64)
    whole, rows = masked_total(values, mask), row_sums(values, mask)
    assert same_bits(row_moments(values, mask)[:, SUM], rows)
    for parts in (2, 4, 8):
        same = 0
        for seed in range(10):
            ranks = cut(64, parts, seed)
            by_rank = pairwise_sum(torch.stack([masked_total(values[mine], mask[mine]) for mine in ranks]))
            assert by_rank.item() == pytest.approx(whole.item(), rel=1e-12)
            same += same_bits(by_rank, whole)
            gathered = over_ranks(row_sums, [values, mask], ranks)
            assert same_bits(gathered, rows) and same_bits(pairwise_sum(gathered), whole)
        assert same < 10, parts
