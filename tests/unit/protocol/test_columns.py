"""Column arithmetic that the protocol's own tests do not reach."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.protocol.columns import chunk_bounds, column_of_values, copy_containers, merge_metrics, object_array, same_value


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.integers(1, 20))
def test_chunk_bounds_cover_all_rows_evenly(rows: int, chunks: int) -> None:
    bounds = chunk_bounds(rows, chunks)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in bounds]
    assert len(sizes) == chunks and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


METRICS = st.dictionaries(st.sampled_from("abc"), st.integers() | st.lists(st.integers(), max_size=2), max_size=3)


@settings(max_examples=30, deadline=None)
@given(st.lists(METRICS, min_size=1, max_size=4), st.lists(METRICS, min_size=1, max_size=4))
def test_merging_metrics_is_associative(left: list[dict], right: list[dict]) -> None:
    assert merge_metrics([merge_metrics(left), merge_metrics(right)]) == merge_metrics([*left, *right])


NAN = float("nan")


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (NAN, NAN, True),
        ([NAN, {"a": (1, NAN)}], [NAN, {"a": (1, NAN)}], True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, 2], (1, 2), False),
        ([1], [1, 2], False),
        (np.array([1.0, NAN]), np.array([1.0, NAN]), True),
        (np.array([1, 2]), [1, 2], False),
        (np.array(["a", "b"]), np.array(["a", "b"]), True),
        (object_array([np.zeros(2), [1]]), object_array([np.zeros(2), [1]]), True),
        (object_array([np.zeros(2), [1]]), object_array([np.zeros(2), [2]]), False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2), np.ones(2), False),
        (None, 0, False),
    ],
)
def test_same_value(left: object, right: object, same: bool) -> None:
    assert same_value(left, right) is same and same_value(right, left) is same


def test_copies_share_leaves_only() -> None:
    leaf = torch.zeros(1)
    original = {"a": [leaf, {1, 2}], "b": (leaf, [3])}
    copied = copy_containers(original)
    copied["a"].append(1)
    copied["b"][1].append(4)
    assert original == {"a": [leaf, {1, 2}], "b": (leaf, [3])} and copied["a"][0] is leaf


def test_columns_of_values_keep_numbers_and_lists() -> None:
    assert object_array([[1, 2], [3, 4]]).shape == (2,)
    assert column_of_values([np.float32(1), np.float32(2)]).dtype == np.float32
    assert column_of_values([1, 2]).dtype == object and column_of_values([]).dtype == object
    assert column_of_values([np.int64(1), np.float32(2)]).dtype == object
