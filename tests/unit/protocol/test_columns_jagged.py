"""Columns of rows of different lengths go through a batch's life as lists of rows would, or are refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhub.errors import ProtocolError
from rlhub.protocol import DataProto, collate_fn, fold_batch_dim, unfold_batch_dim

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


RESHAPES: dict[str, Callable[[DataProto, Path], object]] = {
    "fold_batch_dim": lambda data, _: fold_batch_dim(data, 5),
    "unfold_batch_dim": lambda data, _: unfold_batch_dim(data),
    "unfold_column_chunks": lambda data, _: data.unfold_column_chunks(2, ["x"]),
    "collate_fn": lambda data, _: collate_fn([data[0], data[1]]),
    "save_to_disk": lambda data, folder: data.save_to_disk(folder / "batch"),
}


@pytest.mark.parametrize("reshape", RESHAPES)
def test_what_needs_rows_of_one_length_says_so(reshape: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match=rf"{reshape}.*'x'.*to_padded_tensor"):
        RESHAPES[reshape](batch(), tmp_path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_another_layout_is_refused_at_construction() -> None:
    strided = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.strided)
    with pytest.raises(ProtocolError, match=r"column 'x'.*layout=torch\.jagged"):
        DataProto.from_dict({"x": strided})
