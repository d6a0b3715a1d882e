"""Who sends which part of which weight to whom: computed once from two layouts, before any byte moves.

Both sides describe what they hold as pieces of named tensors (`rlhub.utils.pieces`), so one planner serves every pair of
backends.  The plan is optimal in bytes: a destination copies what its own process holds and receives every other element
exactly once.  It is deterministic, so every process can make it from the same descriptions and none has to be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from rlhub.errors import ReshardError
from rlhub.utils.pieces import PieceInfo
from rlhub.utils.regions import Region, difference, intersection, merged, num_elements, overlapping, remainder


@dataclass(slots=True, kw_only=True, frozen=True)
class Transfer:
    """One part of one tensor from a source rank to a destination rank.

    region: in the full tensor; it may span several pieces of either side.  dtype: what travels, which is the destination's,
    so a wider source casts before it sends.
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

    copies, receives: for each destination rank, what comes from its own process and what comes from others, in the order
    of the tensors.  lower_bound: bytes of all destinations' regions that their own process does not hold.
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
        """For each source rank, to other processes."""
        total = [0] * self.num_sources
        for received in self.receives:
            for transfer in received:
                total[transfer.source] += transfer.num_bytes
        return total

    @property
    def received_bytes(self) -> list[int]:
        """For each destination rank, from other processes."""
        return [sum(transfer.num_bytes for transfer in received) for received in self.receives]

    def sends(self, source: int) -> list[Transfer]:
        """What a source rank sends to other processes, by destination and then as the destination receives it."""
        return [transfer for received in self.receives for transfer in received if transfer.source == source]


def make_plan(
    sources: Sequence[Sequence[PieceInfo]],
    destinations: Sequence[Sequence[PieceInfo]],
    *,
    source_processes: Sequence[int],
    destination_processes: Sequence[int],
    nodes: Mapping[int, int] | None = None,
) -> Plan:
    """The plan from what each source rank holds to what each destination rank needs.

    *_processes: the process of each rank; a process may have ranks of both sides.  nodes: the machine of each process;
    where given, a holder on the destination's machine is preferred.  Among equal holders the bytes to send are balanced.
    Raises ReshardError, naming the tensor: another full shape, a tensor of one side only, a part that no source holds,
    parts of one rank that overlap.
    """
    assert len(sources) == len(source_processes) and len(destinations) == len(destination_processes)
    held, needed = _collect(sources, "source"), _collect(destinations, "destination")
    _check_same_tensors(held, needed)
    own_sources: dict[int, list[int]] = {}
    for rank, process in enumerate(source_processes):
        own_sources.setdefault(process, []).append(rank)
    own = [own_sources.get(process, []) for process in destination_processes]
    copies: list[list[Transfer]] = [[] for _ in destinations]
    cells: list[_Cell] = []
    lower_bound = 0
    for name, tensor in needed.items():
        found = _plan_tensor(name, tensor, held[name], own, copies)
        lower_bound += found.lower_bound
        cells += found.cells
    if nodes is not None:
        _prefer_same_node(cells, [nodes[p] for p in source_processes], [nodes[p] for p in destination_processes])
    receives: list[list[Transfer]] = [[] for _ in destinations]
    for cell, source in zip(cells, _choose_holders(cells, len(sources)), strict=True):
        receives[cell.destination].append(cell.sent_by(source))
    return Plan(num_sources=len(sources), copies=copies, receives=receives, lower_bound=lower_bound)


@dataclass(slots=True)
class _Tensor:
    """One tensor as a side holds it: boxes of each rank that has any."""

    shape: tuple[int, ...]
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    boxes: dict[int, tuple[Region, ...]] = field(default_factory=dict)


def _collect(side: Sequence[Sequence[PieceInfo]], role: str) -> dict[str, _Tensor]:
    """Every tensor of a side, neighbouring pieces of a rank merged; raises ReshardError for pieces that contradict."""
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
    """Merged boxes and two that overlap; cached, for layers repeat."""
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


def _check_same_tensors(held: dict[str, _Tensor], needed: dict[str, _Tensor]) -> None:
    for one, other, problem in (
        (needed, held, "the destination has {}, but no source rank does"),
        (held, needed, "a source rank has {}, but no destination rank does"),
    ):
        names = [name for name in one if name not in other]
        if names:
            raise ReshardError(
                f"{problem.format(names[0])} ({len(names)} such tensors): do both sides run the same model?", weight=names[0]
            )
    for name, tensor in needed.items():
        if tensor.shape != held[name].shape:
            raise ReshardError(
                f"{name} has the full shape {held[name].shape} at the source and {tensor.shape} at the destination: both sides "
                "must run the same model",
                weight=name,
            )


@dataclass(slots=True)
class _Cell:
    """A part that one destination receives whole, and the sources that hold all of it."""

    destination: int
    name: str
    region: Region
    dtype: torch.dtype
    num_bytes: int
    holders: Sequence[int]

    def sent_by(self, source: int) -> Transfer:
        return Transfer(source=source, destination=self.destination, name=self.name, region=self.region, dtype=self.dtype)


@dataclass(slots=True)
class _Found:
    cells: list[_Cell] = field(default_factory=list)
    lower_bound: int = 0


def _plan_tensor(name: str, needed: _Tensor, held: _Tensor, own: Sequence[Sequence[int]], copies: list[list[Transfer]]) -> _Found:
    """What every destination rank receives of one tensor; what its process holds is added to `copies`."""
    holders: dict[Region, list[int]] = {}
    for rank, boxes in held.boxes.items():
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    cutter = _cutter(tuple(sorted(holders)))
    found = _Found()
    for rank, boxes in needed.boxes.items():
        dtype = needed.dtypes[rank]
        near = [(box, source) for source in own[rank] for box in held.boxes.get(source, ())]
        for box in boxes:
            cut = cutter.cut(box, tuple(box for box, _ in near))
            if cut.uncovered is not None:
                raise ReshardError(
                    f"no source rank holds the part {cut.uncovered} of {name} {needed.shape}, which destination rank {rank} "
                    "needs: the description of a source rank is missing or not whole",
                    weight=name,
                )
            for region, index in cut.near:
                transfer = Transfer(source=near[index][1], destination=rank, name=name, region=region, dtype=dtype)
                copies[rank].append(transfer)
            found.lower_bound += cut.far_elements * dtype.itemsize
            for region, indices in cut.far:
                ranks = [source for index in indices for source in holders[cutter.boxes[index]]]
                found.cells.append(_Cell(rank, name, region, dtype, num_elements(region) * dtype.itemsize, ranks))
    return found


@dataclass(slots=True, kw_only=True)
class _Cut:
    """How one needed box comes together, without ranks: the same for every layer and every replica.

    near: (part, index of the box in the own process that has it).  far: (part, indices of all boxes that have all of it).
    """

    near: list[tuple[Region, int]]
    far: list[tuple[Region, tuple[int, ...]]]
    far_elements: int
    uncovered: Region | None


class _Cutter:
    """Cuts needed boxes along the boxes that the sources hold of a tensor, and remembers the results."""

    def __init__(self, boxes: tuple[Region, ...]) -> None:
        self.boxes = boxes
        self._known: dict[tuple[Region, tuple[Region, ...]], _Cut] = {}

    def cut(self, needed: Region, near: tuple[Region, ...]) -> _Cut:
        """`near`: boxes in the destination's own process."""
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
        by_holders: dict[tuple[int, ...], list[Region]] = {}
        for region in far:
            for part, indices in self._atoms(region):
                by_holders.setdefault(indices, []).append(part)
        uncovered = by_holders.pop((), [None])[0]
        return _Cut(
            near=copied,
            far=[(part, indices) for indices, parts in by_holders.items() for part in merged(parts)],
            far_elements=num_elements(needed) - sum(num_elements(part) for part, _ in copied),
            uncovered=uncovered,
        )

    def _atoms(self, region: Region) -> list[tuple[Region, tuple[int, ...]]]:
        """The region in parts that every source box has whole or not at all, each with the boxes that have it."""
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


def _prefer_same_node(cells: list[_Cell], source_nodes: Sequence[int], destination_nodes: Sequence[int]) -> None:
    for cell in cells:
        node = destination_nodes[cell.destination]
        cell.holders = [source for source in cell.holders if source_nodes[source] == node] or cell.holders


def _choose_holders(cells: Sequence[_Cell], num_sources: int) -> list[int]:
    """The source of every cell: what only one holds first, then the largest first to the holder with the least to send."""
    sent = [0] * num_sources
    chosen = [cell.holders[0] for cell in cells]
    free = [index for index, cell in enumerate(cells) if len(cell.holders) > 1]
    for cell in cells:
        if len(cell.holders) == 1:
            sent[cell.holders[0]] += cell.num_bytes
    for index in sorted(free, key=lambda index: (-cells[index].num_bytes, index)):
        source = min(cells[index].holders, key=lambda rank: (sent[rank], rank))
        chosen[index] = source
        sent[source] += cells[index].num_bytes
    return chosen
