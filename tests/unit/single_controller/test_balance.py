"""Balancing splits every row once, by near-optimal load, with the sizes asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.errors import ConfigError
from rlhub.single_controller.balance import balanced_order, partition, sequence_cost

COSTS = st.lists(st.floats(0, 1e6), max_size=40)


@settings(max_examples=100, deadline=None)
@given(costs=COSTS, num_parts=st.integers(1, 9), equal=st.booleans())
def test_every_row_is_in_exactly_one_part(costs: list[float], num_parts: int, equal: bool) -> None:
    parts = partition(costs, num_parts, equal_counts=equal)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in part) == list(range(len(costs)))
    sizes = [len(part) for part in parts]
    if equal:
        assert sizes == [len(rows) for rows in np.array_split(np.arange(len(costs)), num_parts)]
    elif len(costs) >= num_parts:
        assert min(sizes) >= 1


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 50), min_size=4, max_size=8), equal=st.booleans())
def test_two_parts_are_close_to_the_best_there_is(costs: list[int], equal: bool) -> None:
    first, _ = partition(costs, 2, equal_counts=equal)
    sizes = [(len(costs) + 1) // 2] if equal else range(len(costs) + 1)
    sums = [sum(costs[i] for i in chosen) for size in sizes for chosen in itertools.combinations(range(len(costs)), size)]
    best = min(max(total, sum(costs) - total) for total in sums)
    got = sum(costs[i] for i in first)
    assert max(got, sum(costs) - got) <= best + max(costs) / 2


@pytest.mark.parametrize(("rows", "num_parts"), [(1024, 8), (2048, 64)])
def test_long_tailed_lengths_come_out_even(rows: int, num_parts: int) -> None:
    lengths = np.random.default_rng(3).lognormal(6, 1, rows).clip(max=4096).astype(int)
    costs = sequence_cost(lengths)
    as_they_are = max(costs[part].sum() for part in np.array_split(np.arange(rows), num_parts)) / (costs.sum() / num_parts)
    assert as_they_are > 1.05, "the control: without balancing the load is uneven"
    for equal in (False, True):
        loads = [costs[part].sum() for part in partition(costs, num_parts, equal_counts=equal)]
        assert max(loads) / np.mean(loads) < 1.003


def test_order_makes_contiguous_chunks_the_parts() -> None:
    costs = [9.0, 1.0, 8.0, 2.0, 7.0]
    order = balanced_order(costs, 2)
    parts = partition(costs, 2, equal_counts=True)
    assert [sorted(chunk) for chunk in np.array_split(order, 2)] == parts


def test_the_same_input_gives_the_same_parts() -> None:
    costs = np.random.default_rng(0).integers(1, 5, 200)
    assert partition(costs, 7) == partition(list(costs), 7)


def test_attention_makes_one_long_row_dearer_than_many_short_ones() -> None:
    long, short = sequence_cost([8000, 1000], hidden_size=1000)
    assert long > 8 * short
    assert sequence_cost([8000], hidden_size=10**9)[0] == pytest.approx(8 * sequence_cost([1000], hidden_size=10**9)[0], rel=1e-5)


@pytest.mark.parametrize("costs", [[float("nan")], [-1.0], [[1.0]]])
def test_bad_costs_are_refused(costs: list[float]) -> None:
    with pytest.raises(ConfigError):
        partition(costs, 2)


def test_zero_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        partition([1.0], 0)
