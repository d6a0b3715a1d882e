"""Batches whose wide columns lie scattered over the stores of several ranks, beside the same batch in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhub.protocol import DataProto
from rlhub.protocol.batch_ref import BatchRef, ColumnStore
from rlhub.protocol.columns import same_tensor, take_rows
from rlhub.protocol.layout import ColumnInfo, Layout

WIDE = ("ids", "mask", "lengths", "weights", "half")


def ragged(rng: np.random.Generator, num_rows: int, dtype: torch.dtype, trailing: tuple[int, ...] = ()) -> Tensor:
    """Rows of 0 to 9 entries."""
    lengths = rng.integers(0, 10, num_rows)
    values = torch.from_numpy(rng.integers(0, 1000, (int(lengths.sum()), *trailing))).to(dtype)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    column: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return column


def wide_columns(rng: np.random.Generator, num_rows: int) -> dict[str, Tensor]:
    """Ragged and rectangular columns of several dtypes."""
    return {
        "ids": ragged(rng, num_rows, torch.int32),
        "mask": torch.from_numpy(rng.random((num_rows, 5)) < 0.5),
        "lengths": torch.from_numpy(rng.integers(0, 9, num_rows)),
        "weights": ragged(rng, num_rows, torch.float32, (2,)),
        "half": torch.from_numpy(rng.random((num_rows, 3))).bfloat16(),
    }


def scattered(
    seed: int, *, num_rows: int, num_ranks: int, key: str = "b0", stores: Sequence[ColumnStore] | None = None
) -> tuple[DataProto, BatchRef, list[ColumnStore]]:
    """A batch, a reference to the same rows, and the stores of the ranks that have them: any number of rows each."""
    rng = np.random.default_rng(seed)
    stores = stores or [ColumnStore(rank) for rank in range(num_ranks)]
    wide = wide_columns(rng, num_rows)
    rank = rng.integers(0, num_ranks, num_rows)
    place = np.zeros(num_rows, dtype=np.int64)
    for index, store in enumerate(stores):
        rows = rng.permutation(np.flatnonzero(rank == index))
        place[rows] = np.arange(len(rows))
        store.put(key, {name: take_rows(column, torch.from_numpy(rows)) for name, column in wide.items()})
    small = DataProto.from_dict({"uid": torch.arange(num_rows)}, {"text": [f"{key} {row}" for row in range(num_rows)]})
    columns = {name: ColumnInfo.of(column) for name, column in wide.items()}
    whole = DataProto.from_dict({**small.tensors(), **wide}, small.non_tensor_batch)
    return whole, BatchRef((key,), small, columns, Layout.of(rank, place)), list(stores)


def fetch_from(stores: Sequence[ColumnStore], ref: BatchRef) -> DataProto:
    """The rows of a reference with all columns, one row after the other."""
    rows = [ref.slice(row, row + 1) for row in range(len(ref))]
    parts = [row.local(stores[int(row.layout.rank[0])]) for row in rows]
    return DataProto.concat(parts) if parts else ref.local(stores[0])


def travelling_bytes(column: Tensor) -> int:
    """The bytes of a column's values, and of the lengths of its rows (4 bytes each) where it is ragged."""
    return column.values().nbytes + 4 * len(column) if column.is_nested else column.nbytes


def same_batch(left: DataProto, right: DataProto) -> bool:
    """Equal columns bit for bit (their order aside), arrays and meta entries."""
    mine, other = left.tensors(), right.tensors()
    arrays = {name: array.tolist() for name, array in left.non_tensor_batch.items()}
    same_arrays = arrays == {name: array.tolist() for name, array in right.non_tensor_batch.items()}
    same = mine.keys() == other.keys() and all(same_tensor(column, other[name]) for name, column in mine.items())
    return same and same_arrays and left.meta_info == right.meta_info
