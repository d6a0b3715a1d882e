"""Columns of rows of different lengths go through a batch's life as lists of rows would, or are refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhub.errors import ProtocolError
from rlhub.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from rlhub.protocol import columns as columns_module
from tests.support.batch_refs import same_batch

ROWS = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0], [7.0]]


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(rows: list[list[float]] = ROWS) -> DataProto:
    return DataProto.from_dict({"x": jagged(rows), "id": torch.arange(len(rows))}, {"name": [f"r{i}" for i in range(len(rows))]})


def rows_of(data: DataProto) -> list[list[float]]:
    assert data.batch["x"].is_nested and data.batch["x"].layout == torch.jagged
    return [row.tolist() for row in data.batch["x"].unbind()]


MOVES: dict[str, tuple[Callable[[DataProto], DataProto], list[int]]] = {
    "chunk": (lambda data: data.chunk(2)[1], [3, 4]),
    "slice": (lambda data: data[1:4], [1, 2, 3]),
    "indices": (lambda data: data.select_idxs([3, 0, 3]), [3, 0, 3]),
    "a mask": (lambda data: data[np.array([True, False, True, False, False])], [0, 2]),
    "no rows": (lambda data: data.select_idxs([]), []),
    "rows of a slice": (lambda data: data[2:].select_idxs([2, 1]), [4, 3]),
    "repeat": (lambda data: data.repeat(2), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    "repeat in turns": (lambda data: data[:2].repeat(2, interleave=False), [0, 1, 0, 1]),
    "concat": (lambda data: DataProto.concat(data.chunk(3)), [0, 1, 2, 3, 4]),
    "concat of slices": (lambda data: DataProto.concat([data[3:], data[:1], data[2:2]]), [3, 4, 0]),
    "after a journey": (lambda data: pickle.loads(pickle.dumps(data[1:], protocol=5)).select_idxs([2]), [3]),
    "union": (lambda data: data.union(batch()), [0, 1, 2, 3, 4]),
}


@pytest.mark.parametrize("move", MOVES)
def test_rows_of_different_lengths_move_as_a_list_of_rows_does(move: str) -> None:
    act, expected = MOVES[move]
    moved = act(batch())
    assert rows_of(moved) == [ROWS[i] for i in expected]
    assert moved.batch["id"].tolist() == expected
    assert moved.non_tensor_batch["name"].tolist() == [f"r{i}" for i in expected]


def test_gradients_flow_through_a_choice_of_rows() -> None:
    values = torch.arange(3.0, requires_grad=True)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    DataProto.from_dict({"x": column}).select_idxs([1, 1]).batch["x"].values().sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0.0, 2.0, 2.0]


def test_rows_that_differ_in_kind_are_not_joined() -> None:
    other = DataProto.from_dict({"x": jagged([[1.0]]).to(torch.float64), "id": torch.arange(1)}, {"name": ["r"]})
    flat = DataProto.from_dict({"x": torch.zeros(1, 2), "id": torch.arange(1)}, {"name": ["r"]})
    for part in (other, flat):
        with pytest.raises(ProtocolError, match="concat: tensor column 'x' differs"):
            DataProto.concat([batch(), part])


def test_union_with_other_rows_is_an_error_that_names_the_column() -> None:
    with pytest.raises(ProtocolError, match="union: tensor column 'x' differs"):
        batch().union(batch([*ROWS[:-1], [8.0]]))


RESHAPES: dict[str, Callable[[DataProto], object]] = {
    "fold_batch_dim": lambda data: fold_batch_dim(data, 5),
    "unfold_batch_dim": unfold_batch_dim,
    "unfold_column_chunks": lambda data: data.unfold_column_chunks(2, ["x"]),
    "collate_fn": lambda data: collate_fn([data[0], data[1]]),
}


@pytest.mark.parametrize("reshape", RESHAPES)
def test_what_needs_rows_of_one_length_says_so(reshape: str) -> None:
    with pytest.raises(ProtocolError, match=rf"{reshape}.*'x'.*to_padded_tensor"):
        RESHAPES[reshape](batch())


@pytest.mark.parametrize("rows", [slice(None), [3, 0], []], ids=["all", "some", "none"])
def test_a_file_gives_back_rows_of_different_lengths(rows: Any, tmp_path: Path) -> None:
    data = batch().slice() if rows == slice(None) else batch().select_idxs(rows)
    data.save_to_disk(tmp_path / "batch")
    assert same_batch(DataProto.load_from_disk(tmp_path / "batch"), data)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_another_layout_is_refused_at_construction() -> None:
    strided = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.strided)
    with pytest.raises(ProtocolError, match=r"column 'x'.*layout=torch\.jagged"):
        DataProto.from_dict({"x": strided})


def test_rows_that_differ_in_a_later_dimension_are_refused_at_construction() -> None:
    later = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(3, 1)], layout=torch.jagged)
    with pytest.raises(ProtocolError, match=r"column 'x'"):
        DataProto.from_dict({"x": later})


# -- against padded columns ------------------------------------------------------------------------------------------------

DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16)
LAYOUTS, ACTS = 300, 4
"""Random batches, and how many of the operations each of them goes through."""


def unpadded(data: DataProto) -> list[tuple[Any, ...]]:
    """The rows of a padded batch without their padding."""
    lengths = data.batch["length"].tolist()
    rows = zip(lengths, data.batch["mask"], data.batch["x"], data.non_tensor_batch["group"].tolist(), strict=True)
    return [(group, mask[:length].tolist(), x[:length].tolist()) for length, mask, x, group in rows]


def as_rows(data: DataProto) -> list[tuple[Any, ...]]:
    """The rows of a batch without padding, whose columns have kept their kinds."""
    x, mask = data.batch["x"], data.batch["mask"]
    assert x.layout == mask.layout == torch.jagged and mask.dtype == torch.bool and data.batch["length"].dtype == torch.int32
    groups = data.non_tensor_batch["group"].tolist()
    return [(g, m.tolist(), row.tolist()) for g, m, row in zip(groups, mask.unbind(), x.unbind(), strict=True)]


def layout(rng: np.random.Generator) -> tuple[DataProto, DataProto]:
    """A random batch without padding, and the same rows padded.  A column may begin within its values or have gaps there."""
    lengths = rng.integers(0, 6, rng.integers(0, 9)) * rng.integers(0, 2)
    gaps = rng.integers(0, 3, len(lengths)) * rng.integers(0, 2)
    dtype, trailing = DTYPES[rng.integers(len(DTYPES))], [(), (), (2,), (0,)][rng.integers(4)]
    starts = np.cumsum(np.concatenate([[0], lengths + gaps])).astype(np.int64)
    values = torch.from_numpy(rng.integers(0, 100, (starts[-1], *trailing))).to(dtype)
    flags = torch.from_numpy(rng.integers(0, 2, starts[-1])).bool()
    wide = torch.zeros(len(lengths), 6, *trailing, dtype=dtype)
    wide_flags = torch.zeros(len(lengths), 6, dtype=torch.bool)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        wide[row, :length], wide_flags[row, :length] = values[start : start + length], flags[start : start + length]
    offsets = torch.from_numpy(starts)
    extents = torch.from_numpy(lengths.astype(np.int64)) if gaps.any() else None
    columns = {
        "x": torch.nested.nested_tensor_from_jagged(values, offsets, extents),
        "mask": torch.nested.nested_tensor_from_jagged(flags, offsets, extents),
        "length": torch.from_numpy(lengths.astype(np.int32)),
    }
    groups = {"group": [f"group {row // 2}, row {row}" for row in range(len(lengths))]}
    return DataProto.from_dict(columns, groups), DataProto.from_dict({**columns, "x": wide, "mask": wide_flags}, groups)


def in_place(data: DataProto, change: Callable[[DataProto], object]) -> DataProto:
    change(data)
    return data


def acts(rng: np.random.Generator, rows: int) -> dict[str, Callable[[DataProto], DataProto]]:
    """All that moves rows, with random arguments that fit so many rows."""
    some = rng.integers(-rows, rows, rng.integers(0, 12)) if rows else np.zeros(0, dtype=np.int64)
    mask, order, counts = rng.random(rows) < 0.5, rng.permutation(rows), rng.integers(0, 3, rows)
    first, last, step, parts = (int(n) for n in (rng.integers(0, 9), rng.integers(0, 9), rng.integers(1, 4), rng.integers(1, 6)))
    shuffled = {"mini_batch_size": parts, "epochs": 1, "seed": parts, "dataloader_kwargs": {"shuffle": True}}
    return {
        "select_idxs": lambda data: data.select_idxs(some),
        "a mask": lambda data: data[mask],
        "slice": lambda data: data[first:last],
        "a slice with steps": lambda data: data.slice(first, None, step),
        "rows of a slice": lambda data: data[first:].select_idxs(np.arange(len(data[first:]))[::-1].copy()),
        "reorder": lambda data: in_place(data, lambda own: own.reorder(order)),
        "repeat": lambda data: data.repeat(step),
        "repeat in turns": lambda data: data.repeat(step, interleave=False),
        "sample_level_repeat": lambda data: data.sample_level_repeat(counts),
        "chunk and concat": lambda data: DataProto.concat(data.chunk(parts)),
        "split and concat": lambda data: DataProto.concat(data.split(parts)[::-1] or [data]),
        "concat of choices": lambda data: DataProto.concat([data[mask], data[first:last], data.select_idxs([])]),
        "one part of many": lambda data: data.chunk(parts)[-1].repeat(2),
        "padding": lambda data: in_place(data, lambda own: own.padding(step if rows else 0)),
        "pad and unpad": lambda data: unpad_dataproto(*pad_dataproto_to_divisor(data, parts)) if rows else data,
        "pad": lambda data: pad_dataproto_to_divisor(data, parts)[0] if rows else data,
        "union": lambda data: data.select(["length"]).union(data).union(data[:]),
        "mini-batches": lambda data: DataProto.concat([*data.make_iterator(**shuffled), data[:0]]),
        "a journey": lambda data: pickle.loads(pickle.dumps(data, protocol=5)).materialize(),
        "a journey of a part": lambda data: pickle.loads(pickle.dumps(data[first:last], protocol=5)).repeat(2),
        "to": lambda data: data.to("cpu"),
        "deep copy": lambda data: data.select(deepcopy=True),
        "TensorDict": lambda data: DataProto.from_tensordict(data.to_tensordict()),
    }


def check_layouts(num_layouts: int = LAYOUTS) -> None:
    for seed in range(num_layouts):
        rng = np.random.default_rng(seed)
        ragged, padded = layout(rng)
        assert as_rows(ragged) == unpadded(padded)
        chosen = acts(rng, len(ragged))
        for name in rng.choice(list(chosen), ACTS, replace=False).tolist():
            act = chosen[name]
            if name == "TensorDict" and not len(ragged):
                continue  # an empty stack of objects has no rows to make a column of
            moved, expected = act(ragged.select()), act(padded.select())
            assert as_rows(moved) == unpadded(expected), (seed, name)
            assert moved.batch["x"].dtype == ragged.batch["x"].dtype, (seed, name)
            assert moved.batch["x"].values().shape[1:] == ragged.batch["x"].values().shape[1:], (seed, name)
        assert as_rows(ragged) == unpadded(padded), "nothing of the above changes the sender's batch"


def test_every_operation_moves_rows_as_it_moves_padded_ones() -> None:
    check_layouts()


def test_control_rows_of_the_wrong_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = columns_module.take_rows
    monkeypatch.setattr(columns_module, "dense_rows", lambda column: (column.values(), column.offsets().diff()))  # gaps
    with pytest.raises((AssertionError, RuntimeError)):
        check_layouts(40)
    monkeypatch.undo()
    monkeypatch.setattr(
        "rlhub.protocol.data_proto.take_rows", lambda column, rows: take(column, rows.sort().values if column.is_nested else rows)
    )
    with pytest.raises(AssertionError):
        check_layouts(40)
