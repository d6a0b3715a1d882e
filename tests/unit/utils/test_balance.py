"""Balancing splits every row once, by near-optimal load, with the sizes asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.errors import ConfigError
from rlhub.utils import balance
from rlhub.utils.balance import partition, partition_groups

LENGTHS = st.lists(st.integers(0, 4096), max_size=60)


def realistic(kind: str, rows: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    if kind == "lognormal":
        return random.lognormal(6.0, 0.8, rows).clip(8, 8192).astype(int)
    if kind == "uniform":
        return random.integers(16, 4097, rows)
    short = random.random(rows) < 0.7
    return np.where(short, random.normal(300, 80, rows), random.normal(3500, 400, rows)).clip(16, 4096).astype(int)


def even_sizes(rows: int, parts: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(rows), parts)]


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, num_parts=st.integers(1, 9))
def test_free_sizes_leave_no_part_empty(lengths: list[int], num_parts: int) -> None:
    parts = partition(lengths, num_parts)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert [bool(part) for part in parts].count(True) == min(num_parts, len(lengths))
    assert all(part == sorted(part) for part in parts)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, num_parts=st.integers(1, 9), spare=st.integers(0, 3), data=st.data())
def test_capacities_and_loads(lengths: list[int], num_parts: int, spare: int, data: st.DataObject) -> None:
    capacities = [size + data.draw(st.integers(0, spare)) for size in even_sizes(len(lengths), num_parts)]
    loads = data.draw(st.lists(st.integers(0, 10_000), min_size=num_parts, max_size=num_parts))
    parts = partition(lengths, num_parts, capacities=capacities, loads=loads)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    sizes = [len(part) for part in parts]
    assert all(size <= most for size, most in zip(sizes, capacities, strict=True))
    if sum(capacities) == len(lengths):
        assert sizes == capacities


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=4, max_size=8), equal=st.booleans())
def test_two_parts_are_close_to_the_best_there_is(lengths: list[int], equal: bool) -> None:
    sizes = [(len(lengths) + 1) // 2, len(lengths) // 2]
    first, _ = partition(lengths, 2, capacities=sizes if equal else None)
    tried = sizes[:1] if equal else range(len(lengths) + 1)
    sums = [sum(lengths[i] for i in chosen) for size in tried for chosen in itertools.combinations(range(len(lengths)), size)]
    best = min(max(total, sum(lengths) - total) for total in sums)
    got = sum(lengths[i] for i in first)
    assert max(got, sum(lengths) - got) <= best + max(lengths) / 2


@pytest.mark.parametrize("kind", ["lognormal", "uniform", "bimodal"])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("rows", "num_parts"), [(1024, 8), (2048, 64), (2000, 96)])
def test_many_rows_come_out_within_a_few_tokens_of_even(kind: str, equal: bool, rows: int, num_parts: int) -> None:
    lengths = realistic(kind, rows, seed=3)
    mean = lengths.sum() / num_parts
    untouched = max(lengths[part].sum() for part in np.array_split(np.arange(rows), num_parts))
    assert untouched > 1.03 * mean, "the control: without balancing the load is uneven"
    parts = partition(lengths, num_parts, capacities=even_sizes(rows, num_parts) if equal else None)
    assert max(lengths[part].sum() for part in parts) <= np.ceil(mean) + 3


def test_a_row_above_the_mean_stands_alone_and_the_rest_is_even() -> None:
    parts = partition([100, 5, 5, 5, 5, 5, 5], 3)
    assert [0] in parts
    assert sorted(len(part) for part in parts) == [1, 3, 3]


def test_loads_count() -> None:
    parts = partition([10, 10, 10, 10], 2, loads=[20, 0])
    assert [len(part) for part in parts] == [1, 3]
    first, second = partition([10, 4, 3, 1], 2, capacities=[2, 2], loads=[6, 0])
    assert len(first) == 2 and 0 in second


def test_the_same_input_gives_the_same_parts() -> None:
    lengths = np.random.default_rng(0).integers(1, 5, 200)
    assert partition(lengths, 7) == partition(lengths.tolist(), 7)


@pytest.mark.parametrize("lengths", [[float("nan")], [-1.0], [[1.0]]])
def test_bad_lengths_are_refused(lengths: list[float]) -> None:
    with pytest.raises(ConfigError):
        partition(lengths, 2)


def test_impossible_numbers_of_parts_and_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        partition([1], 0)
    with pytest.raises(ConfigError, match="3 rows do not fit"):
        partition([1, 1, 1], 2, capacities=[1, 1])


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_are_assigned_at_once_go_where_they_go_one_by_one(seed: int) -> None:
    """The plain greedy rule is the reference."""
    rng = np.random.default_rng(seed)
    num_parts, num_rows = int(rng.integers(20, 200)), int(rng.integers(0, 2000))
    values = rng.integers(0, int(rng.choice([2, 20, 2000])), num_rows).astype(np.float64)
    loads = rng.integers(0, 50, num_parts).astype(np.float64)
    capacities = [num_rows // num_parts + 1 + int(more) for more in rng.integers(0, 3, num_parts)] if seed % 2 else None
    expected: list[list[int]] = [[] for _ in range(num_parts)]
    sums = loads.tolist()
    for row in np.argsort(-values, kind="stable").tolist():
        free = [part for part in range(num_parts) if capacities is None or len(expected[part]) < capacities[part]]
        part = min(free, key=lambda part: (sums[part], len(expected[part]), part))
        expected[part].append(row)
        sums[part] += values[row]
    assert balance._longest_first(values, loads, capacities) == expected


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12), num_parts=st.integers(1, 5), seed=st.integers(0, 99))
def test_groups_are_split_only_where_they_do_not_fit(sizes: list[int], num_parts: int, seed: int) -> None:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    lengths, capacities = np.random.default_rng(seed).integers(1, 99, len(groups)), even_sizes(len(groups), num_parts)
    parts = partition_groups(lengths, groups, capacities, [0] * num_parts)
    assert [len(part) for part in parts] == capacities
    assert sorted(row for part in parts for row in part) == list(range(len(groups)))
    pieces = sum(len({groups[row] for row in part}) for part in parts)
    assert pieces <= len(sizes) + num_parts * max(sizes)
    if num_parts == 1:
        assert pieces == len(sizes)


def test_whole_groups_of_one_size_stay_whole_and_even() -> None:
    groups = [row % 6 for row in range(48)]
    lengths = [10 + 5 * group for group in groups]
    parts = partition_groups(lengths, groups, [16, 16, 16], [0, 0, 0])
    assert [len({groups[row] for row in part}) for part in parts] == [2, 2, 2]
    assert {sum(lengths[row] for row in part) for part in parts} == {8 * 45}
