"""BatchRef: a batch whose wide columns stay in the processes that made them, and ColumnStore, which keeps them there.

The driver of a step needs one number a row (a length, a score, a group) to decide which rows go where; the columns of tokens are
needed by the ranks that compute on them.  A BatchRef therefore holds the small columns, and for each row the rank that has its
wide columns and the row's place there.  Choosing, repeating, reordering, cutting and joining rows is index arithmetic with the
names and semantics of DataProto.  Wide columns move in two ways only, both explicit: `fetch` brings some to the driver, and an
exchange (`protocol.exchange`) brings every row to the rank that will compute on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhub.errors import ColumnStoreError, ProtocolError
from rlhub.protocol.columns import (
    Index,
    chunk_bounds,
    copy_containers,
    dense_rows,
    join_meta,
    join_tensors,
    num_bytes,
    row_numbers,
    take_rows,
    without,
)
from rlhub.protocol.data_proto import DataProto
from rlhub.protocol.layout import ColumnInfo, Homes, Layout, pack_head, pack_rows, unpack_head, unpack_rows
from rlhub.protocol.readonly_tensor import guard
from rlhub.protocol.sequences import ATTENTION_MASK, INPUT_IDS, PROMPTS, RESPONSES, stored_names, with_padding, without_padding

MOST_KEYS_NAMED = 8
"""An error names at most so many of the batches that a store has."""


class ColumnStore:
    """The wide columns of this process, by batch and name; rows are numbered by their place.

    Tensors are kept as they come and are given out read-only, for several calls read the same memory; a choice of rows is a copy.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._batches: dict[str, dict[str, Tensor]] = {}

    def put(self, key: str, columns: Mapping[str, Tensor]) -> None:
        """Adds columns to a batch, or begins it.  ProtocolError for a column that it has, or one of another length."""
        known = self._batches.get(key, {})
        if twice := known.keys() & columns.keys():
            raise ProtocolError(f"batch {key!r} has a column {min(twice)!r} on rank {self.rank}; no column is written twice")
        lengths = {name: len(column) for name, column in {**known, **columns}.items()}
        if len(set(lengths.values())) > 1:
            raise ProtocolError(f"batch {key!r} on rank {self.rank} would have columns of different lengths: {lengths}")
        self._batches[key] = known | {name: column.detach() for name, column in columns.items()}

    def take(self, key: str, names: Sequence[str], places: np.ndarray | None = None) -> dict[str, Tensor]:
        """Returns those columns of a batch: the rows at `places` in that order, or all.  Raises ColumnStoreError."""
        columns = self._find(key, names)
        chosen = {name: columns[name] for name in names}
        if not chosen:
            return {}
        num_rows = len(next(iter(chosen.values())))
        if places is None or np.array_equal(places, np.arange(num_rows)):
            return {name: column if column.is_nested else guard(column) for name, column in chosen.items()}
        if len(places) and places.max() >= num_rows:
            raise self._lack(key, f"no row {places.max()} but {num_rows} rows")
        rows = torch.from_numpy(places.astype(np.int64))
        return {name: take_rows(column, rows) for name, column in chosen.items()}

    def response_lengths(self, key: str) -> Tensor | None:
        """Returns the tokens of each response of a batch, (rows,); None for one that has no responses, or is not here."""
        column = self._batches.get(key, {}).get(RESPONSES)
        return None if column is None or not column.is_nested else dense_rows(column)[1]

    def drop(self, key: str) -> None:
        """Forgets a batch; one that is not there is no error."""
        self._batches.pop(key, None)

    def clear(self) -> None:
        """Forgets all batches."""
        self._batches.clear()

    def nbytes(self) -> int:
        """Returns the bytes of all columns."""
        return sum(num_bytes(column) for columns in self._batches.values() for column in columns.values())

    def _find(self, key: str, names: Sequence[str]) -> Mapping[str, Tensor]:
        if key not in self._batches:
            listed = sorted(self._batches)
            more = f" and {len(listed) - MOST_KEYS_NAMED} more" if len(listed) > MOST_KEYS_NAMED else ""
            raise self._lack(key, f"no columns; it has {', '.join(listed[:MOST_KEYS_NAMED]) or 'no batch at all'}{more}")
        missing = [name for name in names if name not in self._batches[key]]
        if missing:
            raise self._lack(key, f"no column {missing[0]!r} but {', '.join(sorted(self._batches[key])) or 'none'}")
        return self._batches[key]

    def _lack(self, key: str, what: str) -> ColumnStoreError:
        return ColumnStoreError(
            f"rank {self.rank} has of batch {key!r} {what}. Either the batch was dropped, moved by an exchange or made by the "
            "processes of another group: call with the reference that the exchange returned. Or the process was started again "
            "after it made the columns: take the step again from its samples",
            key=key,
        )


class RowGroup(Protocol):
    """The group of processes that have the rows of a reference."""

    @property
    def processes(self) -> object:
        """Returns the identity of the processes: the groups of roles that share them have the same."""
        ...

    def fetch_rows(self, ref: BatchRef) -> DataProto:
        """Returns all wide columns of the rows of `ref`, in their order, and counts what it brings."""
        ...

    def drop(self, ref: BatchRef) -> None:
        """Lets the processes forget the batches of `ref`."""
        ...


class BatchRef:
    """Rows whose columns `small` are here and whose other columns are in the ColumnStores of a group's processes.

    keys: the batches in the stores to which the rows belong; one, except where batches were joined.  columns: the wide columns.
    group: that of the processes; it does not travel.  copies: by rank, the other rank whose rows it has too, at the same places,
    as tensor-parallel ranks do.  Raises ProtocolError where lengths differ or a name stands in both.

    A reference that has travelled, or is a part of `chunk`, is unpacked at its first use: the driver of many ranks has thousands.
    """

    __slots__ = ("_columns", "_keys", "_layout", "_packed", "_small", "copies", "group")

    def __init__(
        self,
        keys: tuple[str, ...],
        small: DataProto,
        columns: Mapping[str, ColumnInfo],
        layout: Layout,
        group: RowGroup | None = None,
        copies: Mapping[int, int] | None = None,
    ) -> None:
        self._packed: Packed | None = None
        self._keys, self._small, self._columns, self._layout = keys, small, dict(columns), layout
        self.group, self.copies = group, {} if copies is None else copies
        if len(self.layout.rank) != len(self.small):
            raise ProtocolError(f"a layout of {len(self.layout.rank)} rows does not fit {len(self.small)} rows")
        twice = self.columns.keys() & self.names_of_small()
        if twice:
            raise ProtocolError(f"column {sorted(twice)[0]!r} is both in the batch and in the stores of the ranks")

    @classmethod
    def received(cls, packed: Packed, group: RowGroup | None = None, copies: Mapping[int, int] | None = None) -> Self:
        """Returns the reference that has travelled as `packed`.  copies: None for those that came with it."""
        ref = cls.__new__(cls)
        ref._packed, ref.group, ref.copies = packed, group, packed.copies if copies is None else copies
        return ref

    def _open(self) -> None:
        """Unpacks what has travelled: from now on it may be written."""
        if self._packed is not None:
            packed, self._packed = self._packed, None
            keys, columns, _ = unpack_head(packed.head)
            self._keys, self._columns, self._small = keys, dict(columns), packed.columns_here()
            self._layout = Layout.unpack([packed.homes], [packed.num_rows])

    @property
    def keys(self) -> tuple[str, ...]:
        self._open()
        return self._keys

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        self._open()
        return self._columns

    @property
    def small(self) -> DataProto:
        self._open()
        return self._small

    @small.setter
    def small(self, small: DataProto) -> None:
        self._open()
        self._small = small

    @property
    def layout(self) -> Layout:
        self._open()
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._open()
        self._layout = layout

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.keys!r}, {self.small!r}, {self.columns!r}, {self.layout!r})"

    def __len__(self) -> int:
        return len(self.small) if self._packed is None else self._packed.num_rows

    @property
    def key(self) -> str:
        """Returns the one batch to which all rows belong.  ProtocolError where batches were joined."""
        if len(self.keys) != 1:
            raise ProtocolError(f"rows of {len(self.keys)} batches ({', '.join(self.keys)}) have no one key; exchange them first")
        return self.keys[0]

    @property
    def batch(self) -> TensorDict:
        """Returns the small tensor columns."""
        return self.small.batch

    @property
    def non_tensor_batch(self) -> dict[str, np.ndarray]:
        """Returns the small array columns."""
        return self.small.non_tensor_batch

    @property
    def meta_info(self) -> dict[str, Any]:
        return self.small.meta_info

    def names(self) -> set[str]:
        """Returns the names of all columns that a worker can read."""
        tokens = {INPUT_IDS, ATTENTION_MASK} if {PROMPTS, RESPONSES} <= self.columns.keys() else set()
        return self.names_of_small() | self.columns.keys() | tokens

    def names_of_small(self) -> set[str]:
        """Returns the names of the columns that are here."""
        return {*map(str, self.small.batch.keys()), *self.small.non_tensor_batch}

    # -- index arithmetic --------------------------------------------------------------------------------------------------

    def _with(self, small: DataProto, layout: Layout) -> Self:
        return type(self)(self.keys, small, self.columns, layout, self.group, self.copies)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Returns rows [start, end); small columns are views."""
        return self._with(self.small.slice(start, end, step), self.layout.take(slice(start, end, step)))

    def select_idxs(self, idxs: Index) -> Self:
        """Returns the rows named by indices or by a boolean mask (rows,)."""
        rows = row_numbers(idxs, len(self))
        return self._with(self.small.select_idxs(rows), self.layout.take(rows))

    def reorder(self, indices: Index) -> None:
        """Replaces the rows by the rows at `indices`, in place."""
        chosen = self.select_idxs(indices)
        self.small, self.layout = chosen.small, chosen.layout

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Returns every row `repeat_times` times: a a b b when interleaved, else a b a b."""
        index = np.arange(len(self))
        return self.select_idxs(np.repeat(index, repeat_times) if interleave else np.tile(index, repeat_times))

    def chunk(self, chunks: int) -> list[Self]:
        """Returns `chunks` consecutive parts; sizes differ by at most one, empty ones when there are too few rows."""
        if chunks < 1:
            raise ProtocolError(f"chunk: the number of parts must be at least 1, got {chunks}")
        parts = self._pack(chunk_bounds(len(self), chunks))
        return [self.received(part, self.group, self.copies) for part in parts]

    def by_home(self, homes: Sequence[int]) -> list[Self]:
        """Returns the rows of each of these ranks, as generation leaves them: one rank's after another's, in the order of the
        ranks.  Rows in another order are cut as by `chunk`."""
        numbers = np.full(1 + max([*homes, int(self.layout.rank.max(initial=0))]), -1)
        numbers[list(homes)] = np.arange(len(homes))
        parts = numbers[self.layout.rank]
        if np.any(parts < 0) or np.any(parts[1:] < parts[:-1]):
            return self.chunk(len(homes))
        ends = np.searchsorted(parts, np.arange(len(homes) + 1)).tolist()
        return [self.slice(start, end) for start, end in itertools.pairwise(ends)]

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Returns the rows with those columns, small or wide, and meta entries (None: all); `input_ids` and `attention_mask` are
        stored as prompts and responses without padding."""
        batch_keys = None if batch_keys is None else stored_names(batch_keys)
        keys = None if batch_keys is None else [name for name in batch_keys if name not in self.columns]
        small = self.small.select(keys, non_tensor_batch_keys, meta_info_keys)
        wide = {name: info for name, info in self.columns.items() if batch_keys is None or name in batch_keys}
        return type(self)(self.keys, small, wide, self.layout, self.group, self.copies)

    def union(self, other: DataProto | BatchRef) -> Self:
        """Adds the other's columns and meta entries in place; what both have must be equal.  Returns self.

        A reference must name the same rows of the same batches.
        """
        if isinstance(other, BatchRef):
            elsewhere = self.group and other.group and self.group.processes is not other.group.processes
            if self.keys != other.keys or elsewhere or not self.layout.same(other.layout):
                raise ProtocolError(f"union of references to different rows: of {', '.join(self.keys)}, {', '.join(other.keys)}")
            for name in self.columns.keys() & other.columns.keys():
                if self.columns[name] != other.columns[name]:
                    raise ProtocolError(f"union: wide column {name!r} differs between the two references")
        small = other.small if isinstance(other, BatchRef) else other
        wide = self.columns | (other.columns if isinstance(other, BatchRef) else {})
        added = without(small.tensors(), {}).keys() | small.non_tensor_batch.keys()
        if twice := added & wide.keys():
            raise ProtocolError(f"union: column {sorted(twice)[0]!r} is in the stores of the ranks already")
        self.small.union(small)
        self._columns = wide
        return self

    @staticmethod
    def concat(data: Sequence[BatchRef]) -> BatchRef:
        """Returns the rows of all parts in order, joined as DataProto.concat does; the wide columns are the same in all."""
        if not data:
            raise ProtocolError("concat of an empty list: there is no reference to take the columns from")
        if len({id(part.group.processes) for part in data if part.group is not None}) > 1:
            raise ProtocolError("concat: the rows are in the processes of different worker groups; exchange them first")
        copies = data[0].copies if all(part.copies == data[0].copies for part in data) else {}
        packed = [part._packed for part in data if part._packed is not None and isinstance(part._packed.small, bytes)]
        if len(packed) == len(data) and all(part.head == packed[0].head for part in packed):
            layout = Layout.unpack([part.homes for part in packed], [part.num_rows for part in packed])
            keys, columns, _ = unpack_head(packed[0].head)
            return BatchRef(keys, _join_small(packed), columns, layout, data[0].group, copies)
        for part in data:
            if part.columns != data[0].columns:
                names = {name for name, _ in part.columns.items() ^ data[0].columns.items()}
                raise ProtocolError(f"concat: wide column {sorted(names)[0]!r} is not the same in all parts")
        keys = tuple(dict.fromkeys(key for part in data for key in part.keys))
        number = {key: index for index, key in enumerate(keys)}
        layouts = []
        for part in data:
            renamed = np.array([number[key] for key in part.keys], dtype=np.int32)[part.layout.key]
            layouts.append(Layout(part.layout.rank, renamed, part.layout.place))
        small = DataProto.concat([part.small for part in data])
        return BatchRef(keys, small, dict(data[0].columns), Layout.join(layouts), data[0].group, copies)

    # -- the wide columns --------------------------------------------------------------------------------------------------

    def local(self, store: ColumnStore) -> DataProto:
        """Returns these rows with all columns, in the process that has them all.  Raises ColumnStoreError."""
        self.check_rank(store.rank)
        return DataProto(
            TensorDict({**self.small.tensors(), **self.wide(store)}, batch_size=[len(self)]),
            dict(self.small.non_tensor_batch),
            dict(self.small.meta_info),
        )

    def wide(self, store: ColumnStore) -> dict[str, Tensor]:
        """Returns the wide columns of these rows from the store of the process that has them all."""
        names = list(self.columns)
        if len(self.keys) == 1:
            return store.take(self.keys[0], names, self.layout.place) if len(self) else self._no_rows()
        hits = [np.flatnonzero(self.layout.key == index) for index in range(len(self.keys))]
        parts = [store.take(key, names, self.layout.place[rows]) for key, rows in zip(self.keys, hits, strict=True) if len(rows)]
        if not parts:
            return self._no_rows()
        order = torch.from_numpy(np.argsort(np.concatenate(hits), kind="stable"))
        return {name: take_rows(join_tensors([part[name] for part in parts]), order) for name in names}

    def _no_rows(self) -> dict[str, Tensor]:
        return {name: info.empty() for name, info in self.columns.items()}

    def check_rank(self, rank: int) -> None:
        """Raises ProtocolError unless `rank` has all rows."""
        if self._packed is not None and self._packed.homes == self.copies.get(rank, rank):
            return
        other = np.flatnonzero(self.layout.rank != self.copies.get(rank, rank))
        if len(other):
            raise ProtocolError(
                f"{len(other)} of the {len(self)} rows that rank {rank} shall compute on are on other ranks (the first on rank "
                f"{self.layout.rank[other[0]]}); exchange the batch when its rows are in their order"
            )

    def fetch(self, names: Sequence[str], rows: Index | None = None) -> DataProto:
        """Brings wide columns of these rows, or of all, to this process.  The group counts every use."""
        names = stored_names(names)
        if self.group is None:
            raise ProtocolError(f"nothing can fetch {', '.join(names)} here: only references that a worker group returned can")
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise ProtocolError(f"no wide column {missing[0]!r}; there are: {', '.join(sorted(self.columns)) or 'none'}")
        chosen = self.select(names, [], [])
        fetched = self.group.fetch_rows(chosen if rows is None else chosen.select_idxs(rows))
        return DataProto.from_dict(with_padding(fetched.tensors()))

    def fetch_all(self) -> DataProto:
        """Brings all wide columns to this process, and returns them with the small ones."""
        return self.fetch(list(self.columns)).union(self.small)

    def drop(self) -> None:
        """Lets the processes forget the wide columns: their step is over."""
        if self.group is not None:
            self.group.drop(self)

    # -- on its way --------------------------------------------------------------------------------------------------------

    def _pack(self, bounds: Sequence[tuple[int, int]]) -> list[Packed]:
        """Returns consecutive parts [start, stop), which together are all rows, as they travel."""
        tensors, sizes = self.small.tensors(), [stop - start for start, stop in bounds]
        plain = not self.small.non_tensor_batch and not any(column.is_nested for column in tensors.values())
        infos = {name: ColumnInfo.of(column) for name, column in tensors.items()} if plain else {}
        head, homes = pack_head(self.keys, self.columns, infos), self.layout.pack(bounds)
        small: Sequence[bytes | DataProto] = (
            pack_rows(tensors, bounds) if plain else [self.small.slice(*bound).select(meta_info_keys=[]) for bound in bounds]
        )
        near: dict[Homes, dict[int, int]] = {}
        for rank, home in self.copies.items():
            near.setdefault(home, {})[rank] = home
        parts = zip(sizes, homes, small, strict=True)
        return [
            Packed(head, size, home, rows, self.meta_info, near.get(home, {}) if isinstance(home, int) else self.copies)
            for size, home, rows in parts
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels as names, numbers and bytes, without the group: some hundred bytes, for there is one for each rank and call."""
        return _rebuild, tuple(self._packed or self._pack([(0, len(self))])[0])


class Packed(NamedTuple):
    """A reference on its way.

    head: of all parts of a batch, see `pack_head`.  small: the bytes of the small columns, or the columns themselves where they
    are not plain numbers.
    """

    head: bytes
    num_rows: int
    homes: Homes
    small: bytes | DataProto
    meta: dict[str, Any]
    copies: Mapping[int, int]

    def columns_here(self) -> DataProto:
        """Returns the small columns."""
        if isinstance(self.small, DataProto):
            self.small.meta_info.update(copy_containers(self.meta))
            return self.small
        return _join_small([self])


def _join_small(parts: Sequence[Packed]) -> DataProto:
    """Returns the small columns of parts of one head, which travelled as bytes."""
    sizes = [part.num_rows for part in parts]
    columns = unpack_rows([part.small for part in parts if isinstance(part.small, bytes)], sizes, unpack_head(parts[0].head)[2])
    meta = join_meta([part.meta for part in parts if part.meta])
    return DataProto(TensorDict(columns, batch_size=[sum(sizes)]), {}, meta)


def _rebuild(*fields: Any) -> BatchRef:
    return BatchRef.received(Packed(*fields))


Batch = DataProto | BatchRef
"""A batch as the driver has it; what a step does with its small columns is the same for both."""


@dataclass(slots=True, frozen=True)
class Retain:
    """The part of a call's result that stays in the processes.  key: the batch to which it is added.  names: the columns; ():
    every tensor column of more than one number a row."""

    key: str
    names: tuple[str, ...] = ()

    def keep(self, output: DataProto, store: ColumnStore, rows: BatchRef | None = None) -> BatchRef:
        """Puts the columns into the store, and returns what goes back: the other columns, and the reference to these.

        rows: the call's argument by reference; the rows of its batch take its places, and those of another begin one.
        Raises ProtocolError for a name that the result lacks, or rows that are not the whole of this process's part.
        """
        rows = None if rows is None or self.key not in rows.keys else rows
        tensors = output.tensors()
        names = self.names or tuple(name for name, column in tensors.items() if column.is_nested or column.dim() > 1)
        if missing := [name for name in names if name not in tensors]:
            raise ProtocolError(f"the result has no column {missing[0]!r} to retain; it has: {', '.join(tensors) or 'none'}")
        places = np.arange(len(output)) if rows is None else rows.layout.place
        order = np.argsort(places, kind="stable")
        if not np.array_equal(places[order], np.arange(len(output))):
            raise ProtocolError(f"columns of batch {self.key!r} can be retained only from a call on all rows that the rank has")
        kept = {name: tensors[name] if rows is None else take_rows(tensors[name], torch.from_numpy(order)) for name in names}
        stored = without_padding(kept, store.response_lengths(self.key))
        store.put(self.key, stored)
        small = output.select([name for name in tensors if name not in names])
        infos = {name: ColumnInfo.of(column) for name, column in stored.items()}
        return BatchRef((self.key,), small, infos, Layout.of(store.rank, places))
