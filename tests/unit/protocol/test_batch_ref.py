"""A batch held by reference does with its rows what DataProto does, and its columns are found where they stayed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlhub.errors import ColumnStoreError, ProtocolError
from rlhub.protocol import DataProto
from rlhub.protocol.batch_ref import BatchRef, Retain, RowGroup
from rlhub.protocol.column_store import ColumnStore
from rlhub.protocol.layout import ColumnInfo, Layout, Numbers, pack_numbers, pack_rows, unpack_numbers, unpack_rows
from tests.support.batch_refs import fetch_from, same_batch, scattered

Move = Callable[[Any], Any]
MOVES: dict[str, Move] = {
    "as it is": lambda data: data,
    "slice": lambda data: data.slice(2, 9),
    "slice with a step": lambda data: data.slice(1, None, 3),
    "indices": lambda data: data.select_idxs([7, 0, 7, -1]),
    "a mask": lambda data: data.select_idxs(np.arange(11) % 3 == 0),
    "no rows": lambda data: data.select_idxs([]),
    "repeat": lambda data: data.repeat(3),
    "repeat in turns": lambda data: data.repeat(2, interleave=False),
    "chunk": lambda data: data.chunk(4)[2],
    "an empty chunk": lambda data: data.chunk(20)[15],
    "chunks joined": lambda data: type(data).concat(data.chunk(5)[::-1]),
    "a choice of columns": lambda data: data.select(["ids", "uid", "lengths"], ["text"], []),
    "one after the other": lambda data: data.repeat(2).select_idxs(np.arange(22)[::-1]).slice(3, 17).chunk(3)[1],
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("seed", range(5))
def test_rows_move_as_those_of_a_batch_do(move: str, seed: int) -> None:
    whole, ref, stores = scattered(seed, num_rows=11, num_ranks=3)
    moved = MOVES[move](ref)
    expected = MOVES[move](whole)
    assert len(moved) == len(expected)
    assert same_batch(fetch_from(stores, moved), expected)


def test_reorder_changes_in_place_and_chunks_leave_the_batch_alone() -> None:
    whole, ref, stores = scattered(0, num_rows=9, num_ranks=2)
    order = np.random.default_rng(1).permutation(9)
    part = ref.chunk(2)[0]
    ref.reorder(order)
    whole_before = whole.chunk(2)[0]
    whole.reorder(order)
    assert same_batch(fetch_from(stores, ref), whole)
    assert same_batch(fetch_from(stores, part), whole_before)


def group_of(fetch: Callable[[BatchRef], DataProto]) -> RowGroup:
    """A group whose rows come from a function."""
    return cast(RowGroup, SimpleNamespace(processes=fetch, fetch_rows=fetch))


def test_a_reference_travels_without_its_group() -> None:
    whole, ref, stores = scattered(3, num_rows=10, num_ranks=2)
    ref.group = group_of(lambda chosen: fetch_from(stores, chosen))
    copy = pickle.loads(pickle.dumps(ref.chunk(2)[1], protocol=5))
    assert copy.group is None
    assert same_batch(fetch_from(stores, copy), whole.chunk(2)[1])


@pytest.mark.parametrize(
    ("numbers", "packed"),
    [
        ([], 0),
        ([0], 1),
        ([0, 1, 2], 3),
        ([7, 7], (7, 2)),
        ([0, 2], ("B", b"\0\2")),
        ([0, 1, 1], ("B", b"\0\1\1")),
        ([300, 0], ("H", b"\x2c\x01\0\0")),
    ],
)
def test_numbers_travel_in_few_bytes(numbers: list[int], packed: Numbers) -> None:
    assert pack_numbers(np.array(numbers, dtype=np.int32)) == packed
    assert unpack_numbers(packed).tolist() == numbers


def test_a_reference_is_small_on_its_way() -> None:
    """16 rows of three wide columns, as each call sends them to each rank."""
    columns = {name: ColumnInfo(torch.int64, (1024,)) for name in ("input_ids", "attention_mask", "response_mask")}
    ref = BatchRef(("step 3+1",), DataProto.from_dict({"n": torch.arange(16)}).select([]), columns, Layout.of(5, np.arange(16)))
    assert len(pickle.dumps(ref, protocol=5)) < 220


def test_union_adds_columns_of_the_same_rows_only() -> None:
    whole, ref, stores = scattered(4, num_rows=8, num_ranks=2)
    ref.union(DataProto.from_dict({"scores": torch.arange(8.0)}, meta_info={"step": 3}))
    whole.union(DataProto.from_dict({"scores": torch.arange(8.0)}, meta_info={"step": 3}))
    assert same_batch(fetch_from(stores, ref), whole)
    for rank, store in enumerate(stores):
        rows = np.flatnonzero(ref.layout.rank == rank)
        store.put("b0", {"values": torch.zeros(len(rows), 4)})
    more = BatchRef(ref.keys, ref.small.select([], []), {"values": ColumnInfo(torch.float32, (4,))}, ref.layout)
    assert "values" in ref.union(more).columns
    with pytest.raises(ProtocolError, match="different rows"):
        ref.union(more.select_idxs(np.arange(8)[::-1]))
    with pytest.raises(ProtocolError, match="'ids' is in the stores"):
        ref.union(DataProto.from_dict({"ids": torch.zeros(8, 4)}))
    other = BatchRef(ref.keys, ref.small.select([], []), {"values": ColumnInfo(torch.float64, (4,))}, ref.layout)
    with pytest.raises(ProtocolError, match="'values' differs"):
        ref.union(other)


def test_batches_of_several_keys_are_joined() -> None:
    stores = [ColumnStore(rank) for rank in range(2)]
    wholes, refs = zip(
        *[scattered(seed, num_rows=6, num_ranks=2, key=f"k{seed}", stores=stores)[:2] for seed in (5, 6)], strict=True
    )
    ref = BatchRef.concat([refs[0], refs[1].slice(1, 5), refs[0].slice(0, 2)])
    whole = DataProto.concat([wholes[0], wholes[1].slice(1, 5), wholes[0].slice(0, 2)])
    assert ref.keys == ("k5", "k6")
    assert same_batch(fetch_from(stores, ref.select_idxs(np.arange(12)[::-1])), whole.select_idxs(np.arange(12)[::-1]))
    with pytest.raises(ProtocolError, match="2 batches"):
        _ = ref.key
    with pytest.raises(ProtocolError, match="is not the same in all parts"):
        BatchRef.concat([refs[0], refs[1].select([])])
    with pytest.raises(ProtocolError, match="empty list"):
        BatchRef.concat([])


def test_a_column_is_here_or_there() -> None:
    _, ref, _ = scattered(0, num_rows=4, num_ranks=1)
    with pytest.raises(ProtocolError, match="'uid' is both"):
        BatchRef(ref.keys, ref.small, {"uid": ColumnInfo(torch.int64, ())}, ref.layout)
    with pytest.raises(ProtocolError, match="layout of 4 rows does not fit 3"):
        BatchRef(ref.keys, ref.small.slice(0, 3), ref.columns, ref.layout)


def test_rows_of_another_rank_are_refused() -> None:
    _, ref, stores = scattered(0, num_rows=12, num_ranks=3)
    with pytest.raises(ProtocolError, match=r"of the 12 rows that rank 1 shall compute on are on other ranks.*exchange"):
        ref.local(stores[1])


def test_ranks_that_have_copies_of_rows_may_read_them_and_no_others() -> None:
    columns = {"x": ColumnInfo(torch.int64, ())}
    ref = BatchRef(("k",), DataProto.from_dict({"n": torch.arange(4)}), columns, Layout.even(4, [1, 2]), copies={0: 1, 3: 2})
    assert ref.layout.rank.tolist() == [1, 1, 2, 2]
    parts = [pickle.loads(pickle.dumps(part)) for part in ref.chunk(2)]
    assert [dict(part.copies) for part in parts] == [{0: 1}, {3: 2}], "each part travels with its own copies only"
    for part, allowed in zip(parts, ([0, 1], [2, 3]), strict=True):
        for rank in range(4):
            if rank in allowed:
                part.check_rank(rank)
            else:
                with pytest.raises(ProtocolError, match="are on other ranks"):
                    part.check_rank(rank)
    assert BatchRef.concat(ref.chunk(2)).copies == ref.copies
    other = BatchRef(("k",), ref.small, columns, ref.layout)
    assert not BatchRef.concat([ref, other]).copies, "only the ranks that have the rows of all parts may read the whole"


def test_rows_of_different_processes_are_not_joined() -> None:
    _, ref, _ = scattered(0, num_rows=4, num_ranks=2)
    _, other, _ = scattered(0, num_rows=4, num_ranks=2)
    ref.group, other.group = group_of(lambda chosen: chosen.small), group_of(lambda chosen: chosen.small)
    with pytest.raises(ProtocolError, match="different worker groups"):
        BatchRef.concat([ref, other])
    with pytest.raises(ProtocolError, match="different rows"):
        ref.union(other)


def test_fetching_is_explicit_and_goes_to_the_group() -> None:
    whole, ref, stores = scattered(1, num_rows=7, num_ranks=2)
    with pytest.raises(ProtocolError, match="nothing can fetch"):
        ref.fetch(["ids"])
    asked: list[int] = []

    def fetch(chosen: BatchRef) -> DataProto:
        asked.append(len(chosen))
        return fetch_from(stores, chosen)

    ref.group = group_of(fetch)
    assert same_batch(ref.fetch(["ids"], [4, 1]), whole.select_idxs([4, 1]).select(["ids"], []))
    assert torch.equal(ref.repeat(2).fetch(["mask"]).batch["mask"], whole.repeat(2).batch["mask"])
    assert asked == [2, 14]
    with pytest.raises(ProtocolError, match="no wide column 'uid'"):
        ref.fetch(["uid"])


# -- the store ---------------------------------------------------------------------------------------------------------------


def test_a_store_keeps_what_it_is_given() -> None:
    store = ColumnStore(rank=3)
    column = torch.arange(6.0).view(3, 2)
    jagged = torch.nested.nested_tensor([torch.arange(2), torch.arange(0), torch.arange(5)], layout=torch.jagged)
    store.put("a", {"x": column})
    store.put("a", {"y": jagged})
    assert store.nbytes() == 6 * 4 + 7 * 8 + 3 * 8  # values and lengths
    assert torch.equal(store.take("a", ["x"], np.array([2, 0]))["x"], column[[2, 0]])
    assert [len(row) for row in store.take("a", ["y"], np.array([2, 0]))["y"].unbind()] == [5, 2]
    with pytest.raises(ProtocolError, match="'x' on rank 3; no column is written twice"):
        store.put("a", {"x": column})
    with pytest.raises(ProtocolError, match="different lengths"):
        store.put("a", {"z": torch.zeros(4)})
    store.drop("a")
    store.drop("a")
    assert store.nbytes() == 0


def test_what_a_store_gives_cannot_be_written() -> None:
    store = ColumnStore()
    column = torch.zeros(3, 2)
    store.put("a", {"x": column})
    with pytest.raises(RuntimeError, match="read-only"):
        store.take("a", ["x"])["x"].add_(1)
    store.take("a", ["x"], np.array([1, 0]))["x"].add_(1)
    assert not column.any()


def test_a_batch_that_is_not_there_is_named_with_the_remedy() -> None:
    store = ColumnStore(rank=2)
    for index in range(30):
        store.put(f"b{index:02d}", {"x": torch.zeros(2)})
    with pytest.raises(
        ColumnStoreError, match=r"rank 2 has of batch 'gone' no columns; it has b00, .* and 22 more.*again"
    ) as found:
        store.take("gone", ["x"])
    assert found.value.key == "gone" and len(str(found.value)) < 500
    with pytest.raises(ColumnStoreError, match="no column 'y' but x"):
        store.take("b01", ["y"])
    with pytest.raises(ColumnStoreError, match="no row 5 but 2 rows"):
        store.take("b01", ["x"], np.array([5]))
    with pytest.raises(ColumnStoreError, match="no batch at all"):
        ColumnStore().take("x", [])


# -- results that stay -------------------------------------------------------------------------------------------------------


def test_a_result_leaves_its_wide_columns() -> None:
    store = ColumnStore(rank=1)
    output = DataProto.from_dict(
        {"ids": torch.arange(6).view(3, 2), "length": torch.tensor([2, 1, 0])}, {"text": ["a", "b", "c"]}, {"metrics": {"m": 1}}
    )
    ref = Retain("k").keep(output, store)
    assert ref.small.meta_info == {"metrics": {"m": 1}} and set(ref.columns) == {"ids"} and ref.layout.rank.tolist() == [1, 1, 1]
    assert same_batch(ref.local(store), output)


def test_a_result_joins_the_rows_of_its_argument() -> None:
    store = ColumnStore()
    store.put("k", {"ids": torch.arange(4)})
    rows = BatchRef(
        ("k",),
        DataProto(DataProto.from_dict({"n": torch.arange(4)}).batch),
        {"ids": ColumnInfo(torch.int64, ())},
        Layout.even(4, 1),
    ).select_idxs([2, 0, 3, 1])
    output = DataProto.from_dict({"log_probs": torch.tensor([2.0, 0.0, 3.0, 1.0])})
    ref = Retain("k", ("log_probs",)).keep(output, store, rows)
    assert store.take("k", ["log_probs"])["log_probs"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert ref.local(store).batch["log_probs"].tolist() == [2.0, 0.0, 3.0, 1.0]
    more = Retain("other").keep(output.repeat(2), ColumnStore(), rows)
    assert more.layout.place.tolist() == list(range(8)), "a result under another key has rows of its own"
    with pytest.raises(ProtocolError, match="only from a call on all rows"):
        Retain("k", ("log_probs",)).keep(output.slice(0, 2), store, rows.slice(0, 2))
    with pytest.raises(ProtocolError, match="no column 'values' to retain; it has: log_probs"):
        Retain("k", ("values",)).keep(output, store, rows)


@pytest.mark.parametrize("limit", [2**8, 2**15, 2**31])
def test_small_columns_travel_in_the_narrowest_type(limit: int) -> None:
    """Parts of different processes may differ in theirs."""
    columns = {
        "count": torch.tensor([0, limit - 1, 3, limit]),
        "share": torch.tensor([0.5, -1.0, 2.0, 4.0]),
        "below": torch.tensor([-limit - 1, 0, 1, 2]),
    }
    infos = {name: ColumnInfo.of(column) for name, column in columns.items()}
    whole = pack_rows(columns, [(0, 1), (1, 1), (1, 4)])
    alone = [pack_rows({name: column[cut] for name, column in columns.items()}, [(0, size)])[0] for cut, size in CUTS]
    assert len(alone[0]) < len(whole[0]), "the largest number of the whole is not in it"
    for parts in (whole, alone):
        found = unpack_rows(parts, [1, 0, 3], infos)
        assert all(found[name].dtype == column.dtype and torch.equal(found[name], column) for name, column in columns.items())


CUTS = ((slice(0, 1), 1), (slice(1, 1), 0), (slice(1, 4), 3))
