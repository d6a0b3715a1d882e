from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.engines.training.fsdp.micro_batch import MicroBatchConfig, cut, extend_cut, take_rows

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


def test_cut_by_rows() -> None:
    assert cut([1] * 5, MicroBatchConfig(rows=2)) == [[0, 1], [2, 3], [4]]
    assert cut([1] * 5, MicroBatchConfig()) == [[0, 1, 2, 3, 4]]
    assert cut([], MicroBatchConfig(rows=2)) == []


@given(LENGTHS, st.integers(10, 80))
def test_cut_by_tokens(lengths: list[int], budget: int) -> None:
    bins = cut(lengths, MicroBatchConfig(max_tokens=budget))
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    assert all(load <= budget or len(rows) == 1 for load, rows in zip(loads, bins, strict=True))
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[:i])  # no two passes could have been one


@given(LENGTHS, st.integers(0, 6))
def test_extend_keeps_rows_and_reaches_the_count(lengths: list[int], more: int) -> None:
    bins = cut(lengths, MicroBatchConfig(rows=4))
    longer = extend_cut(bins, len(bins) + more)
    assert len(longer) == len(bins) + more
    assert sorted(row for rows in longer for row in rows) == list(range(len(lengths)))
    if any(len(rows) > 1 for rows in longer):
        assert all(longer)  # no rank idles while a pass could still be split


def test_take_rows() -> None:
    rows = {"a": torch.arange(6).view(3, 2), "b": torch.tensor([5.0, 6.0, 7.0])}
    assert take_rows(rows, [2, 0], torch.device("cpu"))["a"].tolist() == [[4, 5], [0, 1]]
    idle = take_rows(rows, [], torch.device("cpu"))
    assert idle["a"].tolist() == [[0, 0]] and idle["b"].tolist() == [0.0]
