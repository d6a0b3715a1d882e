"""DataProtoFuture with an in-memory store that counts what is fetched."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.errors import ProtocolError
from rlhub.protocol import DataProto, DataProtoFuture

STORE: dict[int, DataProto] = {}
FETCHED: list[int] = []


def resolve(references: list[int]) -> list[DataProto]:
    FETCHED.extend(references)
    return [STORE[reference] for reference in references]


def measure(references: list[int]) -> list[int]:
    return [len(STORE[reference]) for reference in references]


def future_of(sizes: list[int], *, measured: bool = True) -> DataProtoFuture:
    STORE.clear()
    FETCHED.clear()
    start = 0
    for reference, size in enumerate(sizes):
        STORE[reference] = DataProto.from_dict({"ids": torch.arange(start, start + size)})
        start += size
    return DataProtoFuture(list(range(len(sizes))), resolve, measure if measured else None)


def ids(data: DataProto) -> list[int]:
    return data.batch["ids"].tolist()


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@given(SIZES, st.integers(1, 7), st.booleans())
@settings(deadline=None, max_examples=30)
def test_chunks_are_the_chunks_of_the_batch(sizes: list[int], parts: int, measured: bool) -> None:
    future = future_of(sizes, measured=measured)
    whole = future.get()
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in future.chunk(parts)]
    assert [ids(chunk.get()) for chunk in chunks] == [ids(part) for part in whole.chunk(parts)]
    assert [chunk.num_rows() for chunk in chunks] == [len(part) for part in whole.chunk(parts)]


@given(SIZES, st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_chunks_of_chunks_and_concat(sizes: list[int], outer: int, inner: int) -> None:
    future = future_of(sizes)
    for chunk, part in zip(future.chunk(outer), future.get().chunk(outer), strict=True):
        assert [ids(piece.get()) for piece in chunk.chunk(inner)] == [ids(piece) for piece in part.chunk(inner)]
    joined = DataProtoFuture.concat([*future.chunk(outer), future])
    assert ids(joined.get()) == ids(future.get()) * 2
    assert [ids(piece.get()) for piece in joined.chunk(inner)] == [ids(piece) for piece in joined.get().chunk(inner)]


def test_a_consumer_fetches_only_the_parts_of_its_rows() -> None:
    future = future_of([4, 4, 4, 4])
    chunks = future.chunk(4)
    assert FETCHED == []  # neither making the future nor cutting it waits
    assert ids(chunks[2].get()) == [8, 9, 10, 11] and FETCHED == [2]
    FETCHED.clear()
    assert ids(future.chunk(2)[1].get()) == list(range(8, 16)) and FETCHED == [2, 3]
    FETCHED.clear()
    assert ids(future.chunk(8)[1].get()) == [2, 3] and FETCHED == [0]


def test_concat_of_whole_futures_is_one_fetch() -> None:
    future = future_of([2, 2])
    joined = DataProtoFuture.concat([future, future])
    assert joined.references == [0, 1, 0, 1] and ids(joined.get()) == [0, 1, 2, 3] * 2
    with pytest.raises(ProtocolError, match="empty"):
        DataProtoFuture.concat([])
    with pytest.raises(ProtocolError, match="at least 1"):
        future.chunk(0)
