"""Where the rows of a batch held by reference are and what their columns are, and how both travel in few bytes."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Union

import numpy as np
import torch
from torch import Tensor

from rlhub.protocol.columns import chunk_bounds, row_shape


@dataclass(slots=True, frozen=True)
class ColumnInfo:
    """The description of a column without its values.  shape: of one row; a ragged column has rows of different lengths in front
    of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    ragged: bool = False

    @classmethod
    def of(cls, column: Tensor) -> ColumnInfo:
        """Returns the description of a column (rows, ...)."""
        shape = row_shape(column)
        return cls(column.dtype, shape[1:] if column.is_nested else shape, column.is_nested)

    @property
    def width(self) -> int:
        """Returns the bytes of one row, of a ragged column those of one of its entries."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Returns such a column without rows."""
        values = torch.empty((0, *self.shape), dtype=self.dtype)
        if not self.ragged:
            return values
        jagged: Tensor = torch.nested.nested_tensor_from_jagged(values, torch.zeros(1, dtype=torch.int64))
        return jagged


Head = tuple[tuple[str, ...], Mapping[str, ColumnInfo], Mapping[str, ColumnInfo]]
"""The part of a message that is the same for all ranks: the keys of batches, their wide columns, and their small ones."""


def pack_head(keys: Sequence[str], columns: Mapping[str, ColumnInfo], small: Mapping[str, ColumnInfo]) -> bytes:
    """Returns a head as it travels; equal heads are equal bytes in every process."""
    described = [
        [(name, str(info.dtype)[6:], info.shape, int(info.ragged)) for name, info in infos.items()] for infos in (columns, small)
    ]
    return zlib.compress(json.dumps([keys, *described], separators=(",", ":")).encode())


@lru_cache(maxsize=64)
def unpack_head(packed: bytes) -> Head:
    """Returns the head of `pack_head`; nobody may write into it."""
    keys, *described = json.loads(zlib.decompress(packed))
    columns, small = (
        {name: ColumnInfo(getattr(torch, dtype), tuple(shape), bool(ragged)) for name, dtype, shape, ragged in infos}
        for infos in described
    )
    return tuple(keys), columns, small


@dataclass(slots=True, frozen=True, eq=False)
class Layout:
    """The home of each row, three arrays (rows,) int32.

    rank: the process of the group that has the row.  key: the index, in the batch's keys, of the batch to which the row belongs
    in that process's store.  place: the row's number in that process's part of that batch.
    """

    rank: np.ndarray
    key: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, rank: int | np.ndarray, place: np.ndarray) -> Layout:
        """Returns the layout of rows under one key.  rank: of each row, or of all."""
        ranks = np.full(len(place), rank) if isinstance(rank, int) else rank
        return cls(ranks.astype(np.int32), np.zeros(len(place), dtype=np.int32), place.astype(np.int32))

    @classmethod
    def parts(cls, ranks: Sequence[int] | np.ndarray, sizes: Sequence[int]) -> Layout:
        """Returns the layout of consecutive parts, each the first rows that its rank has."""
        starts = np.cumsum(sizes) - sizes
        return cls.of(np.repeat(ranks, sizes), np.arange(sum(sizes)) - np.repeat(starts, sizes))

    @classmethod
    def even(cls, num_rows: int, ranks: int | Sequence[int]) -> Layout:
        """Returns the layout in which rank r, or the r-th of `ranks`, has part r of `DataProto.chunk`."""
        homes = np.arange(ranks) if isinstance(ranks, int) else np.asarray(ranks)
        return cls.parts(homes, [stop - start for start, stop in chunk_bounds(num_rows, len(homes))])

    def take(self, rows: np.ndarray | slice) -> Layout:
        """Returns the layout of those rows."""
        return Layout(self.rank[rows], self.key[rows], self.place[rows])

    @staticmethod
    def join(parts: Sequence[Layout]) -> Layout:
        """Returns the layout of all their rows in order."""
        rank, key, place = (np.concatenate(column) for column in zip(*map(Layout.arrays, parts), strict=True))
        return Layout(rank, key, place)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.rank, self.key, self.place

    def same(self, other: Layout) -> bool:
        """Returns whether every row has the same home in both."""
        return all(map(np.array_equal, self.arrays(), other.arrays()))

    def pack(self, bounds: Sequence[tuple[int, int]]) -> list[Homes]:
        """Returns the homes of consecutive parts [start, stop), which together are all rows, as they travel."""
        starts, sizes = [start for start, _ in bounds], [stop - start for start, stop in bounds]
        first = np.repeat(starts, sizes)
        whole = (self.place == np.arange(len(first)) - first) & (self.rank == self.rank[first]) & (self.key == 0)
        homes: list[Homes] = self.rank[np.minimum(starts, len(first) - 1)].tolist() if len(first) else [0] * len(sizes)
        for part in set(np.repeat(np.arange(len(sizes)), sizes)[~whole].tolist()):
            rank, key, place = (pack_numbers(column[slice(*bounds[part])]) for column in self.arrays())
            homes[part] = rank, key, place
        return homes

    @staticmethod
    def unpack(homes: Sequence[Homes], sizes: Sequence[int]) -> Layout:
        """Returns the layout whose consecutive parts travelled as `pack` made them.  sizes: the rows of each."""
        if all(isinstance(part, int) for part in homes):
            return Layout.parts(np.array(homes), sizes)
        pairs = zip(homes, sizes, strict=True)
        return Layout.join([_part(home, size) for home, size in pairs])


def _part(home: Homes, size: int) -> Layout:
    return Layout.parts([home], [size]) if isinstance(home, int) else Layout(*map(unpack_numbers, home))


Homes = Union[int, "tuple[Numbers, Numbers, Numbers]"]
"""The homes of rows on their way: a rank where they are the first that it has under the first key, in the order of their places,
else ranks, keys and places."""

Numbers = int | tuple[int, int] | tuple[str, bytes]
"""int32 numbers on their way: their count where they are 0, 1, 2 and so on; one number and its count; or the narrowest type that
has room for them, and their bytes."""


def pack_numbers(numbers: np.ndarray) -> Numbers:
    """Returns numbers (any,) that are not negative as they travel."""
    count = len(numbers)
    if not count or (numbers[0] == 0 and numbers[-1] == count - 1 and np.array_equal(numbers, np.arange(count))):
        return count
    low, high = int(numbers.min()), int(numbers.max())
    if low == high:
        return low, count
    dtype = np.min_scalar_type(high)
    return dtype.char, numbers.astype(dtype).tobytes()


def unpack_numbers(packed: Numbers) -> np.ndarray:
    """Returns the numbers of `pack_numbers`, int32."""
    if isinstance(packed, int):
        return np.arange(packed, dtype=np.int32)
    first, second = packed
    if isinstance(second, bytes):
        return np.frombuffer(second, dtype=str(first)).astype(np.int32)
    return np.full(second, first, dtype=np.int32)


_NARROW: tuple[tuple[torch.dtype, int, int], ...] = (
    (torch.uint8, 0, 2**8),
    (torch.int16, -(2**15), 2**15),
    (torch.int32, -(2**31), 2**31),
)
_OWN = len(_NARROW)
"""The code of a column that travels in its own type; smaller codes are places in _NARROW."""


def pack_rows(columns: Mapping[str, Tensor], bounds: Sequence[tuple[int, int]]) -> list[bytes]:
    """Returns the bytes of consecutive parts [start, stop) of dense columns: a code for each column's type, then one column after
    the other.  int64 numbers travel in the narrowest type that has room for all of a column."""
    codes = [_code(column) for column in columns.values()]
    sent = [column if code == _OWN else column.to(_NARROW[code][0]) for column, code in zip(columns.values(), codes, strict=True)]
    raw = [column.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for column in sent]
    widths = [ColumnInfo.of(column).width for column in sent]
    pairs, head = list(zip(raw, widths, strict=True)), bytes(codes)
    return [b"".join([head, *(values[start * width : stop * width] for values, width in pairs)]) for start, stop in bounds]


def _code(column: Tensor) -> int:
    if column.dtype != torch.int64 or not column.numel():
        return _OWN
    low, high = int(column.min()), int(column.max())
    return next((code for code, (_, least, beyond) in enumerate(_NARROW) if least <= low and high < beyond), _OWN)


def unpack_rows(parts: Sequence[bytes], sizes: Sequence[int], columns: Mapping[str, ColumnInfo]) -> dict[str, Tensor]:
    """Returns the columns whose consecutive parts travelled as `pack_rows` made them.  sizes: the rows of each part."""
    alike: dict[bytes, list[int]] = {}
    for number, part in enumerate(parts):
        alike.setdefault(part[: len(columns)], []).append(number)
    found = [
        _unpack_alike(codes, [parts[number] for number in numbers], [sizes[number] for number in numbers], columns)
        for codes, numbers in alike.items()
    ]
    if len(found) == 1:
        return found[0]
    came = np.repeat(np.concatenate(list(alike.values())), [sizes[number] for numbers in alike.values() for number in numbers])
    order = torch.from_numpy(np.argsort(came, kind="stable"))
    return {name: torch.cat([some[name] for some in found])[order] for name in columns}


def _unpack_alike(
    codes: bytes, parts: Sequence[bytes], sizes: Sequence[int], columns: Mapping[str, ColumnInfo]
) -> dict[str, Tensor]:
    """Returns the columns of parts with the same codes."""
    sent = [
        info if code == _OWN else replace(info, dtype=_NARROW[code][0])
        for code, info in zip(codes, columns.values(), strict=True)
    ]
    widths = [info.width for info in sent]
    found = {}
    for (name, info), of, before in zip(columns.items(), sent, itertools.accumulate(widths, initial=0), strict=False):
        starts = (len(codes) + size * before for size in sizes)
        joined = bytearray().join(
            [part[start : start + size * of.width] for part, start, size in zip(parts, starts, sizes, strict=True)]
        )
        values = torch.frombuffer(joined, dtype=of.dtype) if joined else torch.empty(0, dtype=of.dtype)
        found[name] = values.to(info.dtype).view(sum(sizes), *info.shape)
    return found
