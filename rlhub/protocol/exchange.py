"""The exchange of a step: rows held by reference go from the ranks that made them to the ranks that will compute on them.

`plan_exchange` compares two layouts and says for each rank which rows it sends where; only rows that change rank move.  A sender
packs the rows of one destination, all columns of them, into one piece of bytes, and ONE collective moves all pieces: the bytes on
the wire are those of the rows, and four for the length of each row of a ragged column.  The ranks of one tensor-, pipeline- or
sequence-parallel shard all get the rows of their part.  The plan and the packing are pure; a `Transport` moves the pieces.

Between the processes of two groups there is no collective.  By `plan_transfer` the ranks that have rows put one piece for each
part of the other group where its ranks can get it (`Handover`), and return; the other group's ranks then get them.  So no rank
waits for one that waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlhub.errors import ProtocolError
from rlhub.protocol.batch_ref import BatchRef, ColumnStore, Retain
from rlhub.protocol.columns import join_tensors, take_rows
from rlhub.protocol.data_proto import DataProto
from rlhub.protocol.layout import ColumnInfo, Layout, Numbers, pack_numbers, unpack_numbers

ROWS = "rows"
"""The role of a process's RowKeeper, in calls and errors; the driver's own roles have other names."""

OTHER_GROUP = -1
"""Stands for the own rank where rows go to the processes of another group or come from them."""

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


class Handover(Protocol):
    """Hands pieces from the processes of one group to those of another."""

    def put(self, piece: Tensor) -> Any:
        """Keeps a piece, uint8 (bytes,), and returns the handle of a few bytes with which other processes get it."""
        ...

    def get(self, handle: Any, role: str, rank: int) -> Tensor:
        """Returns the piece that `rank` of `role` has put.  WorkerDiedError, of that rank, where its process is gone."""
        ...


class OwnMemory:
    """The handover where all groups are in one process."""

    def put(self, piece: Tensor) -> Tensor:
        return piece

    def get(self, handle: Tensor, role: str, rank: int) -> Tensor:
        return handle


def own_store(pieces: Mapping[int, Piece]) -> dict[int, Tensor]:
    """The transport where no row changes rank.  ProtocolError for a piece: there is no other process to send it to."""
    if pieces:
        raise ProtocolError(f"rows were to go to rank {min(pieces)}, but the plan says that none changes rank")
    return {}


@dataclass(slots=True, frozen=True, eq=False)
class RankMoves:
    """The share of one rank in an exchange.

    rank: the rank, OTHER_GROUP where all rows go to other processes or come from them.  rows: (3, kept or sent) int32: the
    destination of each row, ascending, and the row's key and place in this rank's store.  sources: (received,) int32: the rank
    from which each row of its new part comes.  columns: what moves.  moving: whether any row of the group changes rank, so that
    all ranks meet.
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


def plan_exchange(ref: BatchRef, after: Layout, num_ranks: int, copies: Mapping[int, int] | None = None) -> list[RankMoves]:
    """Returns what each rank does so that the rows of `ref`, in their order, get the homes of `after`.

    copies: by rank, the other rank whose rows it gets too.  Rows come from the ranks that `ref.layout` names, never from copies
    of theirs.  Rows of the stores that `ref` does not name go nowhere; one that it names twice is there twice.  ProtocolError
    where a row has no rank, or the places of a rank are not 0, 1, 2 and so on.
    """
    arriving = _arriving(after, num_ranks, copies or {})
    rows, sources = _sent_by(ref.layout, arriving, num_ranks), [ref.layout.rank[rows] for rows in arriving]
    moving = any((came != rank).any() for rank, came in enumerate(sources))
    return [RankMoves(rank, ref.keys, ref.columns, rows[rank], sources[rank], moving) for rank in range(num_ranks)]


def plan_transfer(ref: BatchRef, after: Layout, num_ranks: tuple[int, int]) -> tuple[list[RankMoves], list[RankMoves]]:
    """Returns what the ranks of one group send, and those of another receive, so that rows of `ref` are also in the other group.

    num_ranks: of both groups.  after: the homes in the other.  Raises as `plan_exchange`.
    """
    arriving = _arriving(after, num_ranks[1], {})
    sends, nothing = _sent_by(ref.layout, arriving, num_ranks[0]), np.zeros((3, 0), dtype=np.int32)
    return (
        [RankMoves(OTHER_GROUP, ref.keys, ref.columns, rows, nothing[0], True) for rows in sends],
        [RankMoves(OTHER_GROUP, (), ref.columns, nothing, ref.layout.rank[rows], True) for rows in arriving],
    )


def _arriving(after: Layout, num_ranks: int, copies: Mapping[int, int]) -> list[np.ndarray]:
    """Returns for each rank the rows (received,) that it will have, in the order of their places."""
    _check_ranks(after, num_ranks)
    order = np.lexsort((after.place, after.rank))
    starts = np.searchsorted(after.rank[order], np.arange(num_ranks + 1))
    if not np.array_equal(after.place[order] + starts[after.rank[order]], np.arange(len(order))):
        raise ProtocolError("after an exchange the rows of each rank must have the places 0, 1, 2 and so on, each once")
    homes = [copies.get(rank, rank) for rank in range(num_ranks)]
    return [order[starts[home] : starts[home + 1]] for home in homes]


def _sent_by(before: Layout, arriving: Sequence[np.ndarray], num_ranks: int) -> list[np.ndarray]:
    """Returns for each rank the `RankMoves.rows` that it sends to the ranks in which rows arrive."""
    _check_ranks(before, num_ranks)
    rows = np.concatenate(arriving)
    targets = np.repeat(np.arange(len(arriving)), [len(part) for part in arriving])
    order = np.argsort(before.rank[rows], kind="stable")
    sent = np.stack([targets, before.key[rows], before.place[rows]])[:, order].astype(np.int32)
    starts = np.searchsorted(before.rank[rows][order], np.arange(num_ranks + 1))
    return [sent[:, start:stop] for start, stop in itertools.pairwise(starts)]


def _check_ranks(layout: Layout, num_ranks: int) -> None:
    if len(layout.rank) and not 0 <= layout.rank.min() <= layout.rank.max() < num_ranks:
        raise ProtocolError(f"a row is on rank {layout.rank.max()} of {num_ranks} ranks")


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
        if not start <= stop <= len(piece):  # garbage read as lengths may be negative
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

    def __init__(self, handover: Handover | None = None) -> None:
        self.store = ColumnStore()
        self.transport = GroupTransport()
        self.handover = handover or OwnMemory()

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

    def send(self, moves: RankMoves) -> tuple[dict[int, Any], int]:
        """Puts the rows for each rank of another group where it can get them; returns the handles, and the bytes."""
        _, pieces = pack(self.store, moves)
        joined = {rank: torch.cat(list(piece)) for rank, piece in pieces.items()}
        return {rank: self.handover.put(piece) for rank, piece in joined.items()}, sum(map(len, joined.values()))

    def receive(self, moves: RankMoves, key: str, role: str, handles: Mapping[int, Any]) -> None:
        """Adds rows under `key` that ranks of `role` have put; handles: by those ranks."""
        came = {rank: self.handover.get(handle, role, rank) for rank, handle in handles.items()}
        self.store.put(key, unpack({name: info.empty() for name, info in moves.columns.items()}, came, moves))

    def fetch(self, ref: BatchRef) -> DataProto:
        """Returns the wide columns of rows that are all here."""
        return ref.select(list(ref.columns), [], []).local(self.store)

    def drop(self, keys: Sequence[str]) -> None:
        """Forgets these batches."""
        for key in keys:
            self.store.drop(key)

    def stored_bytes(self) -> int:
        """Returns the bytes of all columns that are kept here."""
        return self.store.nbytes()

    def close(self) -> None:
        self.store.clear()
