"""Column arithmetic of batches: pure functions that cut, join, compare and copy columns and meta dictionaries, and that put a
batch's arrays and meta entries into one TensorDict with its tensors.  Errors name the column.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.nn.functional import pad

from rlhub.errors import ProtocolError

Index = Sequence[int] | Sequence[bool] | np.ndarray | Tensor
"""Row numbers, or a boolean mask over the rows."""

RAW_VIEWS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""Maps dtypes that numpy lacks to dtypes of the same width that it has."""


def chunk_bounds(num_rows: int, num_chunks: int) -> list[tuple[int, int]]:
    """Returns `[start, stop)` of `num_chunks` consecutive chunks whose sizes differ by at most one, the longer ones first."""
    base, extra = divmod(num_rows, num_chunks)
    starts = [index * base + min(index, extra) for index in range(num_chunks + 1)]
    return list(itertools.pairwise(starts))


def object_array(values: Iterable[Any]) -> np.ndarray:
    """Returns a one-dimensional object array with one element a value; lists of equal length stay lists."""
    listed = list(values)
    array = np.empty(len(listed), dtype=object)
    for index, value in enumerate(listed):
        array[index] = value
    return array


def column_of_values(values: Sequence[Any]) -> np.ndarray:
    """Returns the column of the rows' values: numbers of one numpy type as such an array, anything else as an object array."""
    types = {type(value) for value in values}
    return np.array(values) if len(types) == 1 and issubclass(types.pop(), np.generic) else object_array(values)


def copy_containers(value: Any) -> Any:
    """Returns a copy of nested dicts, lists, sets and tuples; leaves are shared."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_containers(item) for item in value]
    if isinstance(value, set):
        return set(value)
    if type(value) is tuple:
        return tuple(copy_containers(item) for item in value)
    return value


def same_value(left: Any, right: Any) -> bool:
    """Returns whether nested values are equal.  Types must agree; NaN equals NaN, though not in tensors."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and same_array(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    both_nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return both_nan or bool(left == right)


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """Returns whether dtype, shape, device and values are equal (NaN differs from NaN, as in torch.equal)."""
    if left.is_nested or right.is_nested:
        same_rows = left.is_nested and right.is_nested and len(left) == len(right)
        return same_rows and all(map(same_tensor, left.unbind(), right.unbind()))
    same_kind = left.dtype == right.dtype and left.shape == right.shape and left.device == right.device
    return same_kind and torch.equal(left, right)


def same_array(left: np.ndarray, right: np.ndarray) -> bool:
    """Returns whether shape and values are equal, NaN equal to NaN; object arrays are compared element by element."""
    if left.shape != right.shape:
        return False
    if left.dtype == object or right.dtype == object:
        return all(map(same_value, left.ravel().tolist(), right.ravel().tolist()))
    floating = all(np.issubdtype(array.dtype, np.inexact) for array in (left, right))
    return bool(np.array_equal(left, right, equal_nan=floating))


def num_bytes(column: Tensor) -> int:
    """Returns the bytes of a column's elements, and of its rows' lengths where it is jagged."""
    return sum(part.nbytes for part in dense_rows(column)) if column.is_nested else column.nbytes


def take_rows(column: Tensor, rows: Tensor) -> Tensor:
    """Returns a copy of those rows of a column, which stays jagged where its rows differ in length."""
    rows = rows.to(column.device)
    if not column.is_nested:
        return column.index_select(0, rows)
    values, starts, lengths = _jagged_parts(column)
    starts, lengths = starts[rows], lengths[rows]
    ends = lengths.cumsum(0)
    # Element i of the result is element i of its row's values, counted from where that row's elements begin here.
    shifts = torch.repeat_interleave(starts - ends + lengths, lengths)
    return jagged(values.index_select(0, shifts + torch.arange(len(shifts), device=column.device)), lengths)


def jagged(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns the jagged column whose rows lie in `values` one after another."""
    column: Tensor = torch.nested.nested_tensor_from_jagged(values, pad(lengths.cumsum(0), (1, 0)))
    return column


def _jagged_parts(column: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the values of a jagged column, and for each row its first element in them and its length."""
    offsets = column.offsets()
    return column.values(), offsets[:-1], offsets.diff() if column.lengths() is None else column.lengths()


def dense_rows(column: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values of a jagged column, its rows one after another without gaps, and their lengths (rows,)."""
    values, starts, lengths = _jagged_parts(column)
    if len(values) == int(lengths.sum()) and bool((starts == lengths.cumsum(0) - lengths).all()):
        return values, lengths
    return dense_rows(take_rows(column, torch.arange(len(lengths))))


def row_shape(column: Tensor) -> tuple[Any, ...]:
    """Returns the shape of one row, in which a length that differs between rows is "jagged"."""
    return ("jagged", *column.values().shape[1:]) if column.is_nested else tuple(column.shape[1:])


def stack_rows(key: str, rows: Sequence[Tensor]) -> Tensor:
    """Returns the column of these rows.  Raises ProtocolError where they differ in shape, which may or may not be meant."""
    shapes = sorted({tuple(row.shape) for row in rows})
    if len(shapes) > 1:
        raise ProtocolError(
            f"collate_fn needs rows of one shape, but those of column {key!r} have {shapes}; choose rows of a jagged column with "
            "select_idxs, or pad it first: column.to_padded_tensor(0)"
        )
    return torch.stack(list(rows))


def check_rectangular(columns: Mapping[str, Any], what: str) -> None:
    """Raises ProtocolError for a jagged column, for which the function `what` has no meaning."""
    for key, column in columns.items():
        if isinstance(column, Tensor) and column.is_nested:
            raise ProtocolError(
                f"{what} needs rows of one length, but column {key!r} is jagged; pad it first: column.to_padded_tensor(0)"
            )


def join_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Returns the concatenation along dimension 0.  A single part is returned as it is.

    On the CPU numpy does the copy: it asks the kernel for huge pages, which makes a large fresh result about 1.5 times
    faster than torch.cat.  Gradients are kept, through torch.cat, where a part has them.
    """
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    if parts[0].is_nested:
        values, lengths = zip(*map(dense_rows, parts), strict=True)
        return jagged(join_tensors(values), torch.cat(lengths))
    plain = all(part.device.type == "cpu" and not part.requires_grad for part in parts)
    if not plain or parts[0].dim() == 0:
        return torch.cat(list(parts))
    raw = RAW_VIEWS.get(dtype)
    arrays = [(part if raw is None else part.contiguous().view(raw)).resolve_conj().resolve_neg().numpy() for part in parts]
    joined = torch.from_numpy(np.concatenate(arrays))
    return joined if raw is None else joined.view(dtype)


def merge_metrics(parts: Iterable[Any]) -> dict[str, list[Any]]:
    """Merges dicts (or lists of dicts) of metrics to one dict of lists, in their order.  A list value is taken apart, so that
    merging is associative; a metric that only some parts have merges too."""
    merged: dict[str, list[Any]] = {}
    for part in parts:
        for metrics in part if isinstance(part, (list, tuple)) else (part,):
            for key, value in metrics.items():
                merged.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    return merged


def row_numbers(idxs: Index, num_rows: int) -> np.ndarray:
    """Returns non-negative row numbers, int64, of indices or of a mask."""
    index = np.asarray(idxs.cpu() if isinstance(idxs, Tensor) else idxs)
    if index.dtype == np.bool_:
        if index.shape != (num_rows,):
            raise ProtocolError(f"a mask of shape {index.shape} does not fit {num_rows} rows")
        return np.flatnonzero(index)
    if index.size == 0:
        return np.zeros(0, dtype=np.int64)
    if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
        raise ProtocolError(f"row numbers must be one-dimensional integers, got {index.dtype} of shape {index.shape}")
    if index.min() < -num_rows or index.max() >= num_rows:
        raise IndexError(f"row numbers {index.min()}..{index.max()} of a batch with {num_rows} rows")
    return np.where(index < 0, index + num_rows, index).astype(np.int64)


def pick(columns: Mapping[str, Any], keys: Sequence[str] | None, kind: str) -> dict[str, Any]:
    for key in keys or ():
        if key not in columns:
            raise ProtocolError(f"no {kind} {key!r}; there are: {', '.join(sorted(map(str, columns))) or 'none'}")
    return dict(columns) if keys is None else {key: columns[key] for key in keys}


def without(columns: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `columns` that `known` lacks."""
    return {key: value for key, value in columns.items() if key not in known}


def join_columns(kind: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenates columns of equal names, trailing shapes and dtypes."""
    joined: dict[str, Any] = {}
    for part in parts[1:]:
        if part.keys() != parts[0].keys():
            raise ProtocolError(
                f"concat: not every part has {kind} {', '.join(map(repr, sorted(part.keys() ^ parts[0].keys())))}"
            )
    for key, first in parts[0].items():
        columns = [part[key] for part in parts]
        kinds = {
            (column.dtype.kind, column.shape[1:]) if isinstance(column, np.ndarray) else (column.dtype, row_shape(column))
            for column in columns
        }
        if len(kinds) > 1:
            raise ProtocolError(f"concat: {kind} {key!r} differs in dtype or row shape between parts: {sorted(map(str, kinds))}")
        is_array = isinstance(first, np.ndarray)
        joined[key] = (columns[0] if len(columns) == 1 else np.concatenate(columns)) if is_array else join_tensors(columns)
    return joined


def join_meta(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key != "metrics" and key in meta and not same_value(meta[key], value):
                raise ProtocolError(f"concat: meta_info key {key!r} differs between parts")
            meta.setdefault(key, copy_containers(value))
    metrics = [part["metrics"] for part in parts if "metrics" in part]
    return {**meta, "metrics": merge_metrics(metrics)} if metrics else meta


def num_array_rows(arrays: Mapping[str, np.ndarray]) -> int:
    """Returns the number of rows of array columns, which are all equally long; 0 without any."""
    return next(map(len, arrays.values()), 0)


def all_gather_rows(tensor: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Returns every rank's rows of `tensor` (rows, ...), jagged or not, in rank order; `counts` are the ranks' numbers of rows.

    Every rank of `group` calls; blocking.  Rows are padded to the longest for the collective.
    """
    if tensor.is_nested:
        values, own_lengths = dense_rows(tensor)
        lengths = all_gather_rows(own_lengths, counts, group)
        gathered = all_gather_rows(values, [int(part.sum()) for part in lengths], group)
        return list(map(jagged, gathered, lengths))
    padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    return [rows[:count] for rows, count in zip(gathered, counts, strict=True)]


def leading_shape(key: str, column: Tensor, num_dims: int) -> tuple[int, ...]:
    """Returns the first dimensions of a column.  Raises ProtocolError for a nested tensor that has no rows to move."""
    # The length of a jagged dimension is symbolic; rows that differ in another dimension than their first cannot be joined.
    if column.is_nested and (column.layout != torch.jagged or num_dims > 1 or isinstance(column.shape[1], int)):
        raise ProtocolError(
            f"column {key!r} is a nested tensor of layout {column.layout} with {num_dims} batch dimensions wanted; rows of "
            "different lengths need torch.nested.nested_tensor(rows, layout=torch.jagged), with one batch dimension"
        )
    return tuple(column.shape[:num_dims])


def check_columns(batch: Any, arrays: Mapping[str, Any]) -> None:
    """Raises ProtocolError, naming the column, unless all are tensors or arrays of one length."""
    if not isinstance(batch, TensorDict) or len(batch.batch_size) != 1:
        got = f"batch_size {list(batch.batch_size)}" if isinstance(batch, TensorDict) else type(batch).__name__
        raise ProtocolError(f"batch must be a TensorDict with one batch dimension, got {got}; see DataProto.from_dict")
    columns: list[tuple[str, Any]] = list(batch.items())
    for key, column in columns:
        if not isinstance(column, Tensor):
            raise ProtocolError(f"column {key!r} of batch must be a tensor, got {type(column).__name__}")
    rows = (int(batch.batch_size[0]), "the tensors have") if columns or batch.batch_size[0] else None
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise ProtocolError(f"column {key!r} must be a numpy array with a row axis, got {type(array).__name__}")
        rows = rows or (len(array), f"column {key!r} has")
        if len(array) != rows[0]:
            raise ProtocolError(f"column {key!r} has {len(array)} rows, {rows[1]} {rows[0]}")


def split_tensordict(
    td: TensorDict, meta_info: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors, the stacks of objects as arrays, and `meta_info` with the single objects added."""
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
    """Returns the exact inverse of `split_tensordict`."""
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
