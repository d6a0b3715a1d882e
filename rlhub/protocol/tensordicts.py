"""Batches and TensorDicts: the check of a batch's columns, and one TensorDict that holds arrays and meta entries too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlhub.errors import ProtocolError
from rlhub.protocol.columns import object_array, same_value


def leading_shape(key: str, column: Tensor, num_dims: int) -> tuple[int, ...]:
    """The first dimensions of a column.  ProtocolError for a nested tensor that has no such, or no rows that can be moved."""
    if column.is_nested and (column.layout != torch.jagged or num_dims > 1):
        raise ProtocolError(
            f"column {key!r} is a nested tensor of layout {column.layout} with {num_dims} batch dimensions asked for; rows of "
            "different lengths are held by torch.nested.nested_tensor(rows, layout=torch.jagged), in one batch dimension"
        )
    return tuple(column.shape[:num_dims])


def check_columns(batch: Any, arrays: Mapping[str, Any]) -> None:
    """ProtocolError, naming the column, unless all are tensors or arrays of one length."""
    if batch is not None and (not isinstance(batch, TensorDict) or len(batch.batch_size) != 1):
        got = f"batch_size {list(batch.batch_size)}" if isinstance(batch, TensorDict) else type(batch).__name__
        raise ProtocolError(f"batch must be a TensorDict with one batch dimension, got {got}; see DataProto.from_dict")
    for key, column in [] if batch is None else batch.items():
        if not isinstance(column, Tensor):
            raise ProtocolError(f"column {key!r} of batch must be a tensor, got {type(column).__name__}")
    rows = None if batch is None else (int(batch.batch_size[0]), "the tensors have")
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise ProtocolError(f"column {key!r} must be a numpy array with a row axis, got {type(array).__name__}")
        rows = rows or (len(array), f"column {key!r} has")
        if len(array) != rows[0]:
            raise ProtocolError(f"column {key!r} has {len(array)} rows, {rows[1]} {rows[0]}")


def split_tensordict(
    td: TensorDict, meta_info: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, np.ndarray], dict[str, Any]]:
    """Tensors, stacks of objects as arrays, single objects added to `meta_info`."""
    meta = dict(meta_info)
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    columns: list[tuple[str, Any]] = list(td.items())
    for key, value in columns:
        if isinstance(value, NonTensorStack):
            arrays[key] = _array_of_stack(value)
        elif isinstance(value, NonTensorData):
            if key in meta and not same_value(meta[key], value.data):
                raise ProtocolError(f"meta_info key {key!r} is given twice with different values")
            meta[key] = value.data
        else:
            tensors[key] = value
    return tensors, arrays, meta


def merge_tensordict(
    tensors: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], num_rows: int
) -> TensorDict:
    """The inverse of `split_tensordict`, exactly."""
    fields: dict[str, Any] = dict(tensors)
    extra: list[tuple[str, Any]] = [(key, _stack_of_array(array)) for key, array in arrays.items()]
    extra += [(key, NonTensorData(value, batch_size=[num_rows])) for key, value in meta.items()]
    for key, value in extra:
        if key in fields:
            raise ProtocolError(f"key {key!r} names more than one of: a tensor column, an array column, a meta_info entry")
        fields[key] = value
    return TensorDict(fields, batch_size=[num_rows])


class _NumberRow(np.ndarray):
    """Marks a row of a numeric array column, as distinct from an object that is an array."""


def _stack_of_array(array: np.ndarray) -> NonTensorStack:
    objects = array.dtype == object and array.ndim == 1
    rows = list(array) if objects else [np.asarray(row).view(_NumberRow) for row in array]
    return NonTensorStack(*[NonTensorData(row, batch_size=[]) for row in rows], batch_size=[len(array)])


def _array_of_stack(stack: NonTensorStack) -> np.ndarray:
    values = [item.data for item in stack.tensordicts]
    if values and all(isinstance(value, _NumberRow) for value in values):
        return np.stack([np.asarray(value) for value in values])
    return object_array(values)
