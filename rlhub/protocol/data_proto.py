"""`DataProto`: the batch that crosses process boundaries.

A batch has tensor columns, array columns (objects or numbers) and a dictionary about the whole.  All columns are equally
long; that is checked at construction.  Names and semantics are those of HybridFlow's controller (Sheng et al.,
arXiv:2409.19256), so that code written for it works here.

Batches received from another process are read-only views of shared memory (`protocol.readonly_tensor`): an in-place write to a
received tensor raises, `materialize()` makes private copies.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlhub.errors import ProtocolError
from rlhub.protocol.columns import (
    Index,
    all_gather_rows,
    check_columns,
    check_rectangular,
    chunk_bounds,
    column_of_values,
    copy_containers,
    join_columns,
    join_meta,
    leading_shape,
    merge_tensordict,
    num_array_rows,
    num_bytes,
    object_array,
    pick,
    row_numbers,
    row_shape,
    same_array,
    same_tensor,
    same_value,
    split_tensordict,
    stack_rows,
    take_rows,
    without,
)
from rlhub.protocol.readonly_tensor import own
from rlhub.protocol.serialization import Packed, pack_tensor, read_columns, unpack_tensor, write_columns

logger = logging.getLogger(__name__)

AUTO_PADDING_KEY = "_auto_padding"
"""A key of meta_info: the sender allows (and engines with equal splits may use) padding of this batch by repeated rows."""


@dataclass(slots=True)
class DataProtoItem:
    """One row of a batch: tensors without the batch dimension, array elements, and the batch's meta dictionary."""

    batch: TensorDict = field(default_factory=lambda: TensorDict({}, batch_size=[]))
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """A batch.  `batch`: tensor columns (rows, ...); `non_tensor_batch`: array columns (rows, ...); `meta_info`: on the whole.

    `batch` is a TensorDict also where there is no tensor column: then it is empty, of as many rows as the array columns have.
    Raises ProtocolError naming the column when lengths differ or a column has the wrong type.
    """

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        self.batch = TensorDict({}, batch_size=[num_array_rows(self.non_tensor_batch)]) if batch is None else batch
        self.check_consistency()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch!r}, {self.non_tensor_batch!r}, {self.meta_info!r})"

    def check_consistency(self) -> None:
        """Raises ProtocolError unless all columns are equally long."""
        check_columns(self.batch, self.non_tensor_batch)

    # -- construction ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | np.ndarray], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Makes tensors tensor columns and arrays array columns; raises ProtocolError naming the key of anything else."""
        for key, value in data.items():
            if not isinstance(value, (Tensor, np.ndarray)):
                raise ProtocolError(f"column {key!r} must be a torch.Tensor or numpy.ndarray, got {type(value).__name__}")
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Returns a batch of tensors that agree in their first `num_batch_dims` dimensions; non-arrays become object arrays.

        The given dictionaries are not changed.  More than one batch dimension excludes array columns.
        """
        if num_batch_dims < 1 or (non_tensors and num_batch_dims != 1):
            raise ProtocolError(f"num_batch_dims must be 1 (at least 1 without non_tensors), got {num_batch_dims}")
        shapes = {key: leading_shape(key, tensor, num_batch_dims) for key, tensor in (tensors or {}).items()}
        first = next(iter(shapes.items()), None)
        for key, shape in shapes.items():
            if len(shape) < num_batch_dims or (first is not None and shape != first[1]):
                raise ProtocolError(
                    f"column {key!r} begins with shape {shape}, column {first and first[0]!r} with {first and first[1]}"
                )
        batch = None if first is None else TensorDict(dict(tensors or {}), batch_size=[first[1][0]])
        arrays = {
            key: value if isinstance(value, np.ndarray) else object_array(value) for key, value in (non_tensors or {}).items()
        }
        meta = {**(meta_info or {}), **({AUTO_PADDING_KEY: True} if auto_padding else {})}
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    @classmethod
    def from_tensordict(cls, td: TensorDict, meta_info: dict[str, Any] | None = None) -> DataProto:
        """Returns a batch; stacks of objects become array columns, and single objects entries of `meta_info`."""
        tensors, arrays, meta = split_tensordict(td, meta_info or {})
        return cls(batch=TensorDict(tensors, batch_size=td.batch_size[:1]), non_tensor_batch=arrays, meta_info=meta)

    def to_tensordict(self) -> TensorDict:
        """Returns everything in one TensorDict; `from_tensordict` gives it back exactly."""
        return merge_tensordict(self.tensors(), self.non_tensor_batch, self.meta_info, len(self))

    def _with(self, batch: TensorDict, arrays: dict[str, np.ndarray]) -> DataProto:
        """Returns a batch of other columns, with a meta dictionary of its own."""
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=copy_containers(self.meta_info))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensor columns as a new dictionary."""
        return cast(dict[str, Tensor], dict(self.batch.items()))

    # -- reading -----------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self.batch.batch_size[0]) or num_array_rows(self.non_tensor_batch)

    def __getitem__(self, item: Any) -> Any:
        """Returns a DataProtoItem for an int, a view for a slice, a copy for a list, array or tensor of indices or booleans."""
        if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            return self._row(int(item))
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, Tensor)):
            return self.select_idxs(item)
        raise TypeError(f"a DataProto is indexed by int, slice, list, array or tensor, not {type(item).__name__}")

    def _row(self, index: int) -> DataProtoItem:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a DataProto with {len(self)} rows")
        arrays = {key: array[index] for key, array in self.non_tensor_batch.items()}
        return DataProtoItem(self.batch[index], arrays, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Returns rows [start, end) as views of the same storage."""
        cut = slice(start, end, step)
        return self._with(self.batch[cut], {key: array[cut] for key, array in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: Index) -> DataProto:
        """Returns a copy of the rows named by indices or by a boolean mask (rows,)."""
        return self._take(row_numbers(idxs, len(self)))

    def _take(self, index: np.ndarray) -> DataProto:
        arrays = {key: array[index] for key, array in self.non_tensor_batch.items()}
        rows = torch.from_numpy(index)
        tensors = {key: take_rows(value, rows) for key, value in self.tensors().items()}
        return self._with(TensorDict(tensors, batch_size=[len(index)]), arrays)

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Returns those columns and meta entries (None: all) as a new batch over the same storage, or over copies."""
        tensors = self.tensors()
        kept = pick(tensors, batch_keys, "tensor column")
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys, "array column")
        meta = pick(self.meta_info, meta_info_keys, "meta_info key")
        batch = TensorDict(kept, batch_size=self.batch.batch_size)
        picked = type(self)(batch=batch, non_tensor_batch=arrays, meta_info=copy_containers(meta))
        return copy.deepcopy(picked) if deepcopy else picked

    # -- in place ----------------------------------------------------------------------------------------------------------

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Removes those columns and meta entries (None: none) and returns them as a batch."""
        taken = self.select(list(batch_keys or ()), list(non_tensor_batch_keys or ()), list(meta_info_keys or ()))
        for key in batch_keys or ():
            del self.batch[key]
        for key in non_tensor_batch_keys or ():
            del self.non_tensor_batch[key]
        for key in meta_info_keys or ():
            del self.meta_info[key]
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Renames tensor columns in place; returns self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ProtocolError(f"rename: {len(old)} old names {old} but {len(new)} new names {new}")
        names = dict(zip(old, new, strict=True))
        tensors = self.tensors()
        pick(tensors, old, "tensor column")
        renamed = [names.get(key, key) for key in tensors]
        if len(set(renamed)) != len(renamed):
            raise ProtocolError(f"rename {names}: two columns would have one name: {renamed}")
        self.batch = TensorDict(dict(zip(renamed, tensors.values(), strict=True)), batch_size=self.batch.batch_size)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the other batch's columns and meta entries in place; those of one name must be equal.  Returns self."""
        if self._has_columns() and other._has_columns() and len(self) != len(other):
            raise ProtocolError(f"union of batches with {len(self)} and {len(other)} rows")
        mine = self.tensors()
        theirs = other.tensors()
        kinds: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any], Callable[[Any, Any], bool]], ...] = (
            ("tensor column", mine, theirs, same_tensor),
            ("array column", self.non_tensor_batch, other.non_tensor_batch, same_array),
            ("meta_info key", self.meta_info, other.meta_info, same_value),
        )
        for kind, left, right, same in kinds:
            for key in left.keys() & right.keys():
                if left[key] is not right[key] and not same(left[key], right[key]):
                    raise ProtocolError(f"union: {kind} {key!r} differs between the two batches")
        if not self.tensors():
            self.batch = TensorDict({}, batch_size=[max(len(self), len(other))])
        self.batch.update(without(theirs, mine))
        self.non_tensor_batch.update(without(other.non_tensor_batch, self.non_tensor_batch))
        self.meta_info.update(copy_containers(without(other.meta_info, self.meta_info)))
        return self

    def _has_columns(self) -> bool:
        return bool(len(self) or self.non_tensor_batch or self.tensors())

    def reorder(self, indices: Index) -> None:
        """Replaces the rows by the rows at `indices`, in place."""
        self._become(self.select_idxs(indices))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Appends the last row ("first": row 0) `padding_size` times, in place."""
        if padding_size and not len(self):
            raise ProtocolError("a batch without rows cannot be padded")
        row = 0 if padding_candidate == "first" else len(self) - 1
        self._become(self._take(np.concatenate([np.arange(len(self)), np.full(padding_size, row)]).astype(np.int64)))

    def to(self, device: str | torch.device) -> DataProto:
        """Moves the tensors in place; returns self."""
        self.batch = self.batch.to(device)
        return self

    def materialize(self) -> DataProto:
        """Replaces read-only columns (a received batch) by private, writable copies in place; returns self."""
        self.batch = TensorDict({key: own(value) for key, value in self.tensors().items()}, batch_size=[len(self)])
        for key, array in self.non_tensor_batch.items():
            self.non_tensor_batch[key] = array if array.flags.writeable else array.copy()
        return self

    def _become(self, other: DataProto) -> None:
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    # -- cutting and joining -----------------------------------------------------------------------------------------------

    def chunk(self, chunks: int) -> list[DataProto]:
        """Returns `chunks` consecutive parts as views; sizes differ by at most one, so parts are empty where rows are few."""
        if chunks < 1:
            raise ProtocolError(f"chunk: the number of parts must be at least 1, got {chunks}")
        return [self.slice(start, stop) for start, stop in chunk_bounds(len(self), chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Returns parts of `split_size` rows as views; the last may be shorter."""
        if split_size < 1:
            raise ProtocolError(f"split: the size of a part must be at least 1, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Returns the rows of all parts in order.  The parts have the same columns; `meta_info["metrics"]` merge into a dict of
        lists, other meta entries that several parts have must agree.  One part alone is not copied."""
        if not data:
            raise ProtocolError("concat of an empty list: there is no batch to take the columns from")
        tensors = join_columns("tensor column", [part.tensors() for part in data])
        arrays = join_columns("array column", [part.non_tensor_batch for part in data])
        batch = TensorDict(tensors, batch_size=[sum(map(len, data))])
        return type(data[0])(batch=batch, non_tensor_batch=arrays, meta_info=join_meta([part.meta_info for part in data]))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Returns every row `repeat_times` times: a a b b when interleaved, else a b a b."""
        index = np.arange(len(self))
        return self._take(np.repeat(index, repeat_times) if interleave else np.tile(index, repeat_times))

    def sample_level_repeat(self, repeat_times: Index) -> DataProto:
        """Returns row i `repeat_times[i]` times, rows in order."""
        counts = np.asarray(repeat_times.cpu() if isinstance(repeat_times, Tensor) else repeat_times).reshape(-1).astype(np.int64)
        if len(counts) != len(self) or (counts < 0).any():
            raise ProtocolError(f"sample_level_repeat: need {len(self)} counts >= 0, got {len(counts)}: {counts.tolist()[:8]}")
        return self._take(np.repeat(np.arange(len(self)), counts))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Cuts columns `split_keys` (rows, n_split * k, ...) into (rows * n_split, k, ...); repeats the others, interleaved."""
        repeated = self.repeat(n_split)
        columns: dict[str, Any] = self.tensors()
        for key, column in pick({**columns, **self.non_tensor_batch}, split_keys or [], "column").items():
            check_rectangular({key: column}, "unfold_column_chunks")
            if column.ndim < 2 or column.shape[1] % n_split:
                raise ProtocolError(f"column {key!r} of shape {tuple(column.shape)} cannot be cut into {n_split} along axis 1")
            cut = column.reshape(len(self) * n_split, column.shape[1] // n_split, *column.shape[2:])
            (repeated.non_tensor_batch if key in self.non_tensor_batch else repeated.batch)[key] = cut
        return repeated

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Mapping[str, bool] | None = None
    ) -> Iterator[DataProto]:
        """Yields mini-batches of `mini_batch_size` rows, `epochs` times over; the last of an epoch may be shorter.

        `dataloader_kwargs`: `shuffle` (False) draws a new order each epoch from `seed`; `drop_last` (False) leaves out a short
        last mini-batch.
        """
        options = {"shuffle": False, "drop_last": False, **(dataloader_kwargs or {})}
        if len(options) > 2 or mini_batch_size < 1:
            raise ProtocolError(
                f"make_iterator: mini_batch_size {mini_batch_size} (>= 1), options {options} (shuffle, drop_last)"
            )
        return self._mini_batches(mini_batch_size, epochs, np.random.default_rng(seed), options["shuffle"], options["drop_last"])

    def _mini_batches(
        self, size: int, epochs: int, rng: np.random.Generator, shuffle: bool, drop_last: bool
    ) -> Iterator[DataProto]:
        for _ in range(epochs):
            rows = self._take(rng.permutation(len(self))) if shuffle else self
            yield from (part for part in rows.split(size) if len(part) == size or not drop_last)

    # -- files, logs, transport --------------------------------------------------------------------------------------------

    def get_data_info(self) -> str:
        """Returns one line a column: name, shape, dtype."""
        columns: dict[str, Any] = {**self.tensors(), **self.non_tensor_batch}
        lines = [f"{key}: {tuple(column.shape)} {column.dtype}" for key, column in columns.items()]
        return "\n".join([f"{len(self)} rows", *lines, f"meta_info: {sorted(self.meta_info)}"])

    def print_size(self, prefix: str = "") -> None:
        """Logs the bytes of tensor and (shallowly) array columns."""
        tensor_bytes = sum(map(num_bytes, self.tensors().values()))
        array_bytes = sum(array.nbytes for array in self.non_tensor_batch.values())
        logger.info(
            "%stensors %.1f MiB, arrays %.1f MiB", f"{prefix}: " if prefix else "", tensor_bytes / 2**20, array_bytes / 2**20
        )

    def save_to_disk(self, filepath: str | Path) -> None:
        """Writes one safetensors file with objects and meta_info as JSON.  ProtocolError names what JSON cannot hold."""
        tensors = self.tensors()
        try:
            write_columns(Path(filepath), tensors, self.non_tensor_batch, self.meta_info, len(self))
        except TypeError as error:
            raise ProtocolError(f"cannot save to {filepath}: {error}") from error

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """Returns the batch of a file of `save_to_disk`; nothing in the file is executed."""
        stored = read_columns(Path(filepath))
        return cls(TensorDict(stored.tensors, batch_size=[stored.num_rows]), stored.arrays, stored.meta)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Lets the tensors' bytes travel out of band, from protocol 5 on."""
        columns = {key: pack_tensor(column, protocol) for key, column in self.tensors().items()}
        return _rebuild, (type(self), len(self), columns, self.non_tensor_batch, self.meta_info)


def _rebuild(
    cls: type[DataProto],
    rows: int,
    columns: dict[str, Packed],
    arrays: dict[str, np.ndarray],
    meta: dict[str, Any],
) -> DataProto:
    return cls(TensorDict({key: unpack_tensor(value) for key, value in columns.items()}, batch_size=[rows]), arrays, meta)


# -- functions on batches --------------------------------------------------------------------------------------------------


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Returns the batch with rows from its start appended (again and again if need be) until `size_divisor` divides its length,
    and their number."""
    pad = -len(data) % size_divisor
    return (data._take(np.arange(len(data) + pad) % max(len(data), 1)), pad) if pad else (data, 0)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Returns the batch without its last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshapes columns (rows, ...) to (new_batch_size, rows / new_batch_size, ...)."""
    check_rectangular(data.tensors(), "fold_batch_dim")
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ProtocolError(f"fold_batch_dim: {len(data)} rows do not fold into {new_batch_size}")
    return _reshape_rows(data, 1, (new_batch_size, len(data) // new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Joins the first `batch_dims` axes of every column to one."""
    check_rectangular(data.tensors(), "unfold_batch_dim")
    columns: list[Any] = [*data.tensors().values(), *data.non_tensor_batch.values()]
    leading = {tuple(column.shape[:batch_dims]) for column in columns}
    if len(leading) > 1 or any(len(shape) < batch_dims for shape in leading):
        raise ProtocolError(f"unfold_batch_dim: columns differ in their first {batch_dims} axes: {sorted(leading)}")
    return _reshape_rows(data, batch_dims, (int(np.prod(leading.pop())) if leading else 0,))


def _reshape_rows(data: DataProto, num_old: int, new: tuple[int, ...]) -> DataProto:
    arrays = {key: array.reshape(*new, *array.shape[num_old:]) for key, array in data.non_tensor_batch.items()}
    tensors = {key: tensor.reshape(*new, *tensor.shape[num_old:]) for key, tensor in data.tensors().items()}
    return data._with(TensorDict(tensors, batch_size=new[:1]), arrays)


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Returns the batch of these rows, with the first row's meta_info."""
    if not items:
        raise ProtocolError("collate_fn of no rows")
    arrays = {key: column_of_values([item.non_tensor_batch[key] for item in items]) for key in items[0].non_tensor_batch}
    rows = [item.batch for item in items]
    columns = {key: stack_rows(key, [row[key] for row in rows]) for key in list(rows[0].keys())}
    return DataProto(TensorDict(columns, [len(rows)]), arrays, copy_containers(items[0].meta_info))


def all_gather_data_proto(data: DataProto, group: dist.ProcessGroup | None = None) -> DataProto:
    """Replaces `data`, in place, by the concatenation of every rank's rows in rank order; returns it.

    Every rank of `group` calls; blocking.  Ranks may have different numbers of rows, but the same columns.
    """
    columns = data.tensors()
    spec = {key: (column.dtype, row_shape(column)) for key, column in columns.items()}
    shared: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shared, (len(data), spec, data.non_tensor_batch, data.meta_info), group=group)
    if any(other != spec for _, other, _, _ in shared):
        raise ProtocolError(f"all_gather_data_proto: the ranks' tensor columns differ: {[other for _, other, _, _ in shared]}")
    counts = [rows for rows, _, _, _ in shared]
    gathered = {key: all_gather_rows(columns[key], counts, group) for key in sorted(columns)}
    parts = [
        DataProto(TensorDict({key: gathered[key][rank] for key in columns}, [counts[rank]]), arrays, meta)
        for rank, (_, _, arrays, meta) in enumerate(shared)
    ]
    joined = DataProto.concat(parts)
    data.batch, data.non_tensor_batch, data.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
    return data
