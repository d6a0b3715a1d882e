"""The exchange of a step: rows held by reference go from the ranks that made them to the ranks that will compute on them.

`plan_exchange` compares two layouts and says for each rank which rows it sends where; only rows that change rank move.  A sender
packs the rows of one destination, all columns of them, into one piece of bytes, and ONE collective moves all pieces: the bytes on
the wire are those of the rows, and four for the length of each row of a ragged column.  The plan and the packing are pure; a
`Transport` moves the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlhub.errors import ProtocolError
from rlhub.protocol.batch_ref import BatchRef, ColumnInfo, ColumnStore, Layout, Numbers, Retain, pack_numbers, unpack_numbers
from rlhub.protocol.columns import join_tensors, take_rows
from rlhub.protocol.data_proto import DataProto

ROWS = "rows"
"""The role of a process's RowKeeper, in calls and errors; the driver's own roles have other names."""

Piece = Sequence[Tensor]
"""The bytes for one destination, uint8 (bytes,) each, to be sent one after the other."""


class Transport(Protocol):
    """Moves pieces between the ranks of a group; every rank calls it at the same time."""

    def __call__(self, pieces: Mapping[int, Piece]) -> Mapping[int, Tensor]:
        """Sends each piece to its rank, and returns what came by rank, uint8 (bytes,)."""
        ...


class GroupTransport:
    """all_to_all_single with unequal splits over a process group.  Blocking; every rank of the group calls.

    device: "cpu" for gloo, the rank's GPU for NCCL.  sent_bytes: all that this rank has sent, the sizes of the pieces included.
    """

    def __init__(self, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None) -> None:
        self.device, self.group = torch.device(device), group
        self.sent_bytes = 0

    def __call__(self, pieces: Mapping[int, Piece]) -> dict[int, Tensor]:
        ranks = range(dist.get_world_size(self.group))
        sizes = torch.tensor([sum(map(len, pieces.get(rank, ()))) for rank in ranks], device=self.device)
        coming = torch.empty_like(sizes)
        dist.all_to_all_single(coming, sizes, group=self.group)
        out, into = sizes.tolist(), coming.tolist()
        parts = [part for rank in ranks for part in pieces.get(rank, ())]
        sent = torch.cat([torch.empty(0, dtype=torch.uint8), *parts]).to(self.device)
        received = torch.empty(sum(into), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(received, sent, into, out, group=self.group)
        self.sent_bytes += sum(out) + sizes.nbytes
        cut = torch.split(received.cpu(), into)
        return {rank: cut[rank] for rank in ranks if into[rank]}


def own_store(pieces: Mapping[int, Piece]) -> dict[int, Tensor]:
    """The transport where no row changes rank.  ProtocolError for a piece: there is no other process to send it to."""
    if pieces:
        raise ProtocolError(f"rows were to go to rank {min(pieces)}, but the plan says that none changes rank")
    return {}


@dataclass(slots=True, frozen=True, eq=False)
class RankMoves:
    """The share of one rank in an exchange.

    rows: (3, kept or sent) int32: the destination of each row, ascending, and the row's key and place in this rank's store.
    sources: (received,) int32: the rank from which each row of its new part comes.  columns: what moves.  moving: whether any
    row of the group changes rank, so that all ranks meet.
    """

    rank: int
    keys: tuple[str, ...]
    columns: dict[str, ColumnInfo]
    rows: np.ndarray
    sources: np.ndarray
    moving: bool

    def __reduce__(self) -> tuple[Any, ...]:
        columns = [(name, info.dtype, info.shape, info.ragged) for name, info in self.columns.items()]
        return _rebuild, (self.rank, self.keys, columns, self.moving, *map(pack_numbers, (*self.rows, self.sources)))


def _rebuild(rank: int, keys: tuple[str, ...], columns: list[tuple[Any, ...]], moving: bool, *numbers: Numbers) -> RankMoves:
    infos = {name: ColumnInfo(*info) for name, *info in columns}
    *rows, sources = map(unpack_numbers, numbers)
    return RankMoves(rank, keys, infos, np.stack(rows), sources, moving)


def plan_exchange(ref: BatchRef, after: Layout, num_ranks: int) -> list[RankMoves]:
    """Returns what each rank does so that the rows of `ref`, in their order, get the homes of `after`.

    Rows of the stores that `ref` does not name go nowhere; one that it names twice is there twice.  ProtocolError where a row
    has no rank, or the places of a rank are not 0, 1, 2 and so on.
    """
    before = ref.layout
    ranks = np.arange(num_ranks)
    for layout in (before, after):
        if len(layout.rank) and not 0 <= layout.rank.min() <= layout.rank.max() < num_ranks:
            raise ProtocolError(f"a row is on rank {layout.rank.max()} of {num_ranks} ranks")
    sending = np.lexsort((after.place, after.rank, before.rank))
    sends = np.searchsorted(before.rank[sending], [*ranks, num_ranks])
    receiving = np.lexsort((after.place, after.rank))
    receives = np.searchsorted(after.rank[receiving], [*ranks, num_ranks])
    if not np.array_equal(after.place[receiving] + receives[after.rank[receiving]], np.arange(len(receiving))):
        raise ProtocolError("after an exchange the rows of each rank must have the places 0, 1, 2 and so on, each once")
    rows = np.stack([after.rank, before.key, before.place])[:, sending].astype(np.int32)
    sources = before.rank[receiving].astype(np.int32)
    moving = bool((before.rank != after.rank).any())
    return [
        RankMoves(
            rank=rank,
            keys=ref.keys,
            columns=ref.columns,
            rows=rows[:, sends[rank] : sends[rank + 1]],
            sources=sources[receives[rank] : receives[rank + 1]],
            moving=moving,
        )
        for rank in range(num_ranks)
    ]


def pack(store: ColumnStore, moves: RankMoves) -> tuple[dict[str, Tensor], dict[int, Piece]]:
    """Returns the rows that stay, and the piece of each other rank.  Raises ColumnStoreError."""
    targets, key, place = moves.rows
    layout = Layout(np.full(len(targets), moves.rank), key, place)
    small = DataProto(TensorDict({}, batch_size=[len(targets)]))
    columns = BatchRef(moves.keys, small, moves.columns, layout).wide(store)
    cuts = np.searchsorted(targets, np.unique(targets)).tolist() + [len(targets)]
    staying = {name: info.empty() for name, info in moves.columns.items()}
    pieces: dict[int, Piece] = {}
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        rows = {name: take_rows(column, torch.arange(start, stop)) for name, column in columns.items()}
        if targets[start] == moves.rank:
            staying = rows
        else:
            pieces[int(targets[start])] = [part for column in rows.values() for part in _to_bytes(column)]
    return staying, pieces


def unpack(staying: Mapping[str, Tensor], came: Mapping[int, Tensor], moves: RankMoves) -> dict[str, Tensor]:
    """Returns the rank's new part: the rows that stayed and those that came, each at its place.

    ProtocolError where what came is not the rows that the plan says.
    """
    expected = set(np.unique(moves.sources).tolist()) - {moves.rank}
    num_bytes = sum(info.dtype.itemsize for info in moves.columns.values())
    if num_bytes and set(came) - expected:
        raise ProtocolError(f"rank {moves.rank} got rows from ranks {sorted(came)}, the plan says {sorted(expected)}")
    places = [np.flatnonzero(moves.sources == moves.rank)]
    parts = {name: [column] for name, column in staying.items()}
    for source in sorted(expected):
        places.append(np.flatnonzero(moves.sources == source))
        read = _from_bytes(came.get(source, torch.empty(0, dtype=torch.uint8)), moves.columns, len(places[-1]))
        for name, column in read.items():
            parts[name].append(column)
    order = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable"))
    for name, columns in parts.items():
        if sum(map(len, columns)) != len(order):
            raise ProtocolError(f"rank {moves.rank} kept {len(columns[0])} rows of {name!r}, the plan says {len(places[0])}")
    return {name: take_rows(join_tensors(columns), order) for name, columns in parts.items()}


def _to_bytes(column: Tensor) -> list[Tensor]:
    """Returns the values as bytes, after the lengths of the rows where these differ."""
    if not column.is_nested:
        return [_raw(column)]
    rows = column.unbind()
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return [_raw(lengths), *map(_raw, rows)]


def _raw(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(piece: Tensor, columns: Mapping[str, ColumnInfo], num_rows: int) -> dict[str, Tensor]:
    """Returns the columns of a piece.  ProtocolError where its size is not that of so many rows."""
    start = 0

    def read(dtype: torch.dtype, count: int) -> Tensor:
        nonlocal start
        stop = start + count * dtype.itemsize
        if stop > len(piece):
            raise ProtocolError(f"a piece of {len(piece)} bytes is too short for its {num_rows} rows")
        values = piece[start:stop].clone().view(dtype)  # a copy, for bytes in the middle of a piece are not aligned
        start = stop
        return values

    found = {}
    for name, info in columns.items():
        width = int(np.prod(info.shape, dtype=np.int64))
        if not info.ragged:
            found[name] = read(info.dtype, num_rows * width).view(num_rows, *info.shape)
            continue
        lengths = read(torch.int32, num_rows).long()
        values = read(info.dtype, int(lengths.sum()) * width).view(-1, *info.shape)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        found[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
    if start != len(piece):
        raise ProtocolError(f"a piece of {len(piece)} bytes is too long for its {num_rows} rows of {start} bytes")
    return found


class RowKeeper:
    """The ColumnStore of a process as the driver reaches it: rows move, are read, and are forgotten.

    It stands beside the workers of the process's roles and is called like one; every rank of the group runs every call.
    """

    def __init__(self) -> None:
        self.store = ColumnStore()
        self.transport = GroupTransport()

    def place(self, rank: int, device: str) -> None:
        """Says which rank this is, and from which device it sends."""
        self.store.rank, self.transport.device = rank, torch.device(device)

    def exchange(self, moves: RankMoves, key: str) -> int:
        """Replaces the rows of the old keys by the rank's new part, under `key` (collective where rows move).

        Returns the bytes that this rank sent.
        """
        before = self.transport.sent_bytes
        staying, pieces = pack(self.store, moves)
        came = self.transport(pieces) if moves.moving else own_store(pieces)
        part = unpack(staying, came, moves)
        for old in moves.keys:
            self.store.drop(old)
        self.store.put(key, part)
        return self.transport.sent_bytes - before

    def keep(self, rows: DataProto, key: str) -> BatchRef:
        """Puts all columns of these rows under the key."""
        return Retain(key, tuple(rows.tensors())).keep(rows, self.store)

    def fetch(self, ref: BatchRef) -> DataProto:
        """Returns the wide columns of rows that are all here."""
        return replace(ref, small=ref.small.select([], [], [])).local(self.store)

    def drop(self, keys: Sequence[str]) -> None:
        """Forgets these batches."""
        for key in keys:
            self.store.drop(key)

    def stored_bytes(self) -> int:
        """Returns the bytes of all columns that are kept here."""
        return self.store.nbytes()

    def close(self) -> None:
        self.store.clear()
