"""The plan of a transfer: which rank sends which part of which weight to which rank, computed once from two layouts.

Both sides describe their weights as pieces of named tensors (`protocol.weights.pieces`), so one planner serves every pair of
backends.  The plan is optimal in bytes: a destination copies the parts that its own process has, and receives every other
element exactly once.  The plan is deterministic, so every process makes the same one from the same descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from rlhub.errors import ReshardError
from rlhub.protocol.weights.pieces import (
    PieceInfo,
    Region,
    difference,
    intersection,
    merged,
    num_elements,
    overlapping,
    remainder,
)
from rlhub.utils.collector import without_collector


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One part of one tensor, from a source rank to a destination rank.

    region: the part in the full tensor; it may span several pieces of either side.
    dtype: the destination's dtype, in which the part travels; a wider source casts before it sends.
    """

    source: int
    destination: int
    name: str
    region: Region
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return num_elements(self.region) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True, frozen=True)
class Plan:
    """Everything that moves in one update of the destination's weights.

    copies, receives: for each destination rank, the transfers from its own process and from others, in the order of the tensors.
    lower_bound: the bytes of all destinations' regions that their own process lacks.
    """

    num_sources: int
    copies: list[list[Transfer]]
    receives: list[list[Transfer]]
    lower_bound: int

    @property
    def wire_bytes(self) -> int:
        return sum(self.received_bytes)

    @property
    def sent_bytes(self) -> list[int]:
        """Returns the bytes that each source rank sends to other processes."""
        total = [0] * self.num_sources
        for received in self.receives:
            for transfer in received:
                total[transfer.source] += transfer.num_bytes
        return total

    @property
    def received_bytes(self) -> list[int]:
        """Returns the bytes that each destination rank receives from other processes."""
        return [sum(transfer.num_bytes for transfer in received) for received in self.receives]

    def sends(self, source: int) -> list[Transfer]:
        """Returns a source rank's transfers to other processes, sorted by destination and then in the order of receiving."""
        return [transfer for received in self.receives for transfer in received if transfer.source == source]


@without_collector()
def make_plan(
    sources: Sequence[Sequence[PieceInfo]],
    destinations: Sequence[Sequence[PieceInfo]],
    *,
    source_processes: Sequence[int],
    destination_processes: Sequence[int],
    nodes: Mapping[int, int] | None = None,
) -> Plan:
    """Plans the transfer from the pieces of the source ranks to those of the destination ranks.

    Among several owners of a part, those on the destination's machine come first, and then the bytes to send are balanced.
    Raises ReshardError, naming the tensor, for different full shapes, a tensor of one side only, a part without a source, and
    parts of one rank that overlap.

    source_processes, destination_processes: the process of each rank; a process may have ranks of both sides.
    nodes: the machine of each process; None ignores machines.
    """
    assert len(sources) == len(source_processes) and len(destinations) == len(destination_processes)
    owned, needed = _collect(sources, "source"), _collect(destinations, "destination")
    _check_same_tensors(owned, needed)
    planner = _Planner(source_processes, destination_processes, nodes)
    for name, tensor in needed.items():
        planner.add(name, tensor, owned[name])
    planner.choose_senders()
    return Plan(num_sources=len(sources), copies=planner.copies, receives=planner.receives, lower_bound=planner.lower_bound)


@dataclass(slots=True)
class _Tensor:
    """One tensor of a side: the boxes of each rank that has any."""

    shape: tuple[int, ...]
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    boxes: dict[int, tuple[Region, ...]] = field(default_factory=dict)


def _collect(side: Sequence[Sequence[PieceInfo]], role: str) -> dict[str, _Tensor]:
    """Returns every tensor of a side, with neighbouring pieces of a rank merged.  Raises ReshardError for pieces that
    contradict each other."""
    tensors: dict[str, _Tensor] = {}
    for rank, pieces in enumerate(side):
        for piece in pieces:
            tensor = tensors.get(piece.name)
            if tensor is None:
                tensor = tensors[piece.name] = _Tensor(piece.shape)
            _check_piece(piece, tensor, rank, role)
            if num_elements(piece.region):
                tensor.dtypes[rank] = piece.dtype
                tensor.boxes[rank] = (*tensor.boxes.get(rank, ()), piece.region)
    for name, tensor in tensors.items():
        for rank, boxes in tensor.boxes.items():
            if len(boxes) > 1:
                tensor.boxes[rank], clash = _union(boxes)
                if clash:
                    raise ReshardError(
                        f"{role} rank {rank} describes parts of {name} that overlap: {clash[0]} and {clash[1]}; each element "
                        "may be in one piece only",
                        weight=name,
                    )
    return tensors


@lru_cache(maxsize=4096)
def _union(boxes: tuple[Region, ...]) -> tuple[tuple[Region, ...], tuple[Region, Region] | None]:
    """Returns the merged boxes, and two boxes that overlap or None.  Results are cached, because layers repeat."""
    union = tuple(merged(boxes))
    return union, overlapping(union)


def _check_piece(piece: PieceInfo, tensor: _Tensor, rank: int, role: str) -> None:
    if piece.shape != tensor.shape:
        raise ReshardError(
            f"{role} rank {rank} says that {piece.name} has the full shape {piece.shape}, another {role} rank says "
            f"{tensor.shape}: all ranks must run the same model",
            weight=piece.name,
        )
    if not _inside(piece.region, piece.shape):
        raise ReshardError(
            f"{role} rank {rank} describes the part {piece.region} of {piece.name}, which is not inside its full shape "
            f"{piece.shape}",
            weight=piece.name,
        )
    if tensor.dtypes.get(rank, piece.dtype) != piece.dtype:
        raise ReshardError(
            f"{role} rank {rank} holds parts of {piece.name} as {tensor.dtypes[rank]} and as {piece.dtype}: one dtype is needed",
            weight=piece.name,
        )


@lru_cache(maxsize=4096)
def _inside(region: Region, shape: tuple[int, ...]) -> bool:
    return len(region) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(region, shape, strict=True)
    )


def _check_same_tensors(owned: dict[str, _Tensor], needed: dict[str, _Tensor]) -> None:
    for one, other, problem in (
        (needed, owned, "the destination has {}, but no source rank does"),
        (owned, needed, "a source rank has {}, but no destination rank does"),
    ):
        names = [name for name in one if name not in other]
        if names:
            raise ReshardError(
                f"{problem.format(names[0])} ({len(names)} such tensors): do both sides run the same model?", weight=names[0]
            )
    for name, tensor in needed.items():
        if tensor.shape != owned[name].shape:
            raise ReshardError(
                f"{name} has the full shape {owned[name].shape} at the source and {tensor.shape} at the destination: both sides "
                "must run the same model",
                weight=name,
            )


class _Planner:
    """Collects the copies and receives of every destination rank, tensor by tensor, and then chooses among equal owners."""

    def __init__(
        self, source_processes: Sequence[int], destination_processes: Sequence[int], nodes: Mapping[int, int] | None
    ) -> None:
        in_process: dict[int, list[int]] = {}
        for rank, process in enumerate(source_processes):
            in_process.setdefault(process, []).append(rank)
        self._own = [in_process.get(process, []) for process in destination_processes]
        self._source_nodes = [nodes[process] if nodes else 0 for process in source_processes]
        self._nodes = [nodes[process] if nodes else 0 for process in destination_processes]
        self._sent = [0] * len(source_processes)
        self._open: list[tuple[Transfer, Sequence[int]]] = []
        self.copies: list[list[Transfer]] = [[] for _ in destination_processes]
        self.receives: list[list[Transfer]] = [[] for _ in destination_processes]
        self.lower_bound = 0

    def add(self, name: str, needed: _Tensor, owned: _Tensor) -> None:
        """Plans one tensor for all destinations.  If several sources have a part, `choose_senders` decides later which one
        sends it."""
        owners = _Owners(owned, self._source_nodes)
        for rank, boxes in needed.boxes.items():
            dtype = needed.dtypes[rank]
            near = [(box, source) for source in self._own[rank] for box in owned.boxes.get(source, ())]
            for box in boxes:
                cut = owners.cutter.cut(box, tuple(box for box, _ in near))
                if cut.uncovered is not None:
                    raise ReshardError(
                        f"no source rank holds the part {cut.uncovered} of {name} {needed.shape}, which destination rank {rank} "
                        "needs: the description of a source rank is missing or not whole",
                        weight=name,
                    )
                self.lower_bound += cut.far_elements * dtype.itemsize
                for region, index in cut.near:
                    source = near[index][1]
                    self.copies[rank].append(Transfer(source=source, destination=rank, name=name, region=region, dtype=dtype))
                for region, elements, indices in cut.far:
                    ranks = owners.of(indices, self._nodes[rank])
                    transfer = Transfer(source=ranks[0], destination=rank, name=name, region=region, dtype=dtype)
                    self.receives[rank].append(transfer)
                    if len(ranks) == 1:
                        self._sent[ranks[0]] += elements * dtype.itemsize
                    else:
                        self._open.append((transfer, ranks))

    def choose_senders(self) -> None:
        """Chooses the sender of each part that several ranks have: the largest transfer first, from the rank with the least to
        send."""
        for transfer, owners in sorted(self._open, key=lambda choice: -choice[0].num_bytes):
            transfer.source = min(owners, key=lambda rank: (self._sent[rank], rank))
            self._sent[transfer.source] += transfer.num_bytes
        self._open.clear()


class _Owners:
    """Finds the source ranks that have the boxes of one tensor."""

    def __init__(self, owned: _Tensor, nodes: Sequence[int]) -> None:
        ranks: dict[Region, list[int]] = {}
        for rank, boxes in owned.boxes.items():
            for box in boxes:
                ranks.setdefault(box, []).append(rank)
        self.cutter = _cutter(tuple(sorted(ranks)))
        self._ranks = [ranks[box] for box in self.cutter.boxes]
        self._nodes = nodes
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def of(self, indices: tuple[int, ...], node: int) -> list[int]:
        """Returns the ranks with any of the boxes: those on the node, or all if it has none."""
        known = self._known.get((indices, node))
        if known is None:
            ranks = [rank for index in indices for rank in self._ranks[index]]
            known = self._known[indices, node] = [rank for rank in ranks if self._nodes[rank] == node] or ranks
        return known


@dataclass(slots=True, kw_only=True)
class _Cut:
    """The parts that make up one needed box, without ranks, so that every layer and replica shares it.

    near: (part, index of the box in the destination's own process that contains it).
    far: (part, its number of elements, indices of all source boxes that contain it).
    uncovered: a part that no source has; None if there is none.
    """

    near: list[tuple[Region, int]]
    far: list[tuple[Region, int, tuple[int, ...]]]
    far_elements: int
    uncovered: Region | None


class _Cutter:
    """Cuts needed boxes along the sources' boxes of a tensor, and caches the results."""

    def __init__(self, boxes: tuple[Region, ...]) -> None:
        self.boxes = boxes
        self._known: dict[tuple[Region, tuple[Region, ...]], _Cut] = {}

    def cut(self, needed: Region, near: tuple[Region, ...]) -> _Cut:
        """Returns the parts of a needed box.  near: the boxes in the destination's own process."""
        known = self._known.get((needed, near))
        if known is None:
            known = self._known[needed, near] = self._cut(needed, near)
        return known

    def _cut(self, needed: Region, near: tuple[Region, ...]) -> _Cut:
        copied = [
            (part, index)
            for index, box in enumerate(near)
            if (common := intersection(needed, box)) is not None
            for part in difference(common, near[:index])
        ]
        far = merged(difference(needed, near))
        by_owners: dict[tuple[int, ...], list[Region]] = {}
        for region in far:
            for part, indices in self._atoms(region):
                by_owners.setdefault(indices, []).append(part)
        uncovered = by_owners.pop((), [None])[0]
        return _Cut(
            near=copied,
            far=[(part, num_elements(part), indices) for indices, parts in by_owners.items() for part in merged(parts)],
            far_elements=num_elements(needed) - sum(num_elements(part) for part, _ in copied),
            uncovered=uncovered,
        )

    def _atoms(self, region: Region) -> list[tuple[Region, tuple[int, ...]]]:
        """Returns the region in parts that every source box contains wholly or not at all, each with the boxes that contain
        it."""
        atoms: list[tuple[Region, tuple[int, ...]]] = [(region, ())]
        for index, box in enumerate(self.boxes):
            if intersection(region, box) is not None:
                atoms = [part for atom, indices in atoms for part in _divided(atom, indices, box, index)]
        return atoms


@lru_cache(maxsize=256)
def _cutter(boxes: tuple[Region, ...]) -> _Cutter:
    return _Cutter(boxes)


def _divided(atom: Region, indices: tuple[int, ...], box: Region, index: int) -> Iterator[tuple[Region, tuple[int, ...]]]:
    common = intersection(atom, box)
    if common is None:
        yield atom, indices
        return
    yield common, (*indices, index)
    for rest in remainder(atom, common):
        yield rest, indices
