"""Pieces of named tensors, in which training engines, rollout engines, resharding and checkpoints describe weights.

Names and shapes are those of the Hugging Face checkpoint (`model.layers.0.mlp.experts.3.up_proj.weight`, unfused), whatever a
backend fuses or splits in memory.  A piece lies in a region: a half-open range for each dimension of the tensor's full shape.
Whatever a backend does to a weight (rows, columns, heads, experts, flat ranges of an optimizer) comes down to regions, so one
kind of code moves all of them; the arithmetic of regions is in the second half of this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Region = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension, 0 <= start <= stop; () is a scalar."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PieceInfo:
    """The description of a Piece, without its data.  shape: that of the full tensor."""

    name: str
    shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return num_elements(self.region) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class Piece:
    """A part of a named tensor in the memory of this process.

    tensor: a live VIEW with the region's sizes (any strides): writing to it changes the backend's weight.  shape: that of
    the full tensor.  A process may hold several pieces of one tensor; they do not overlap.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    region: Region

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == sizes(self.region), (self.name, tuple(self.tensor.shape), self.region)

    @property
    def info(self) -> PieceInfo:
        return PieceInfo(name=self.name, shape=self.shape, region=self.region, dtype=self.tensor.dtype)


def whole_piece(name: str, tensor: Tensor) -> Piece:
    """Returns the piece that is all of a tensor."""
    shape = tuple(tensor.shape)
    return Piece(name=name, tensor=tensor, shape=shape, region=whole(shape))


def by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Returns the pieces of each tensor, in the order given."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return found


def views(pieces: Iterable[Piece], region: Region) -> Iterator[tuple[Tensor, Region]]:
    """Yields a live view of each piece of one tensor in a region, and its place counted from the region's first corner.

    A planned transfer may span several pieces, for neighbours were merged: a copy goes piece by piece.
    """
    for piece in pieces:
        common = intersection(piece.region, region)
        if common is not None:
            yield take(piece.tensor, relative(common, piece.region)), relative(common, region)


def whole(shape: Sequence[int]) -> Region:
    """Returns the region that is all of a tensor."""
    return tuple((0, size) for size in shape)


def sizes(region: Region) -> tuple[int, ...]:
    """Returns the shape of a region."""
    return tuple(stop - start for start, stop in region)


def num_elements(region: Region) -> int:
    """Returns the number of elements in a region; 1 for a scalar."""
    count = 1
    for start, stop in region:  # four times as fast as a generator in math.prod, and large plans call it millions of times
        count *= stop - start
    return count


def intersection(a: Region, b: Region) -> Region | None:
    """Returns the part that both regions have; None where they have none."""
    common = tuple((max(low_a, low_b), min(high_a, high_b)) for (low_a, high_a), (low_b, high_b) in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def relative(inner: Region, outer: Region) -> Region:
    """Returns `inner` in coordinates that start at the first corner of `outer`."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(inner, outer, strict=True))


def moved(region: Region, origin: Region) -> Region:
    """Returns a region that is relative to `origin` in the coordinates of `origin`; the inverse of `relative`."""
    return tuple((start + base, stop + base) for (start, stop), (base, _) in zip(region, origin, strict=True))


def take(tensor: Tensor, region: Region) -> Tensor:
    """Returns the region of a tensor, as a view."""
    return tensor[tuple(slice(start, stop) for start, stop in region)] if region else tensor


def remainder(region: Region, taken: Region) -> list[Region]:
    """Returns the rest of `region` without `taken` (inside it), in at most two boxes a dimension."""
    left: list[Region] = []
    rest = list(region)
    for dim, ((start, stop), (first, last)) in enumerate(zip(region, taken, strict=True)):
        for low, high in ((start, first), (last, stop)):
            if low < high:
                left.append((*rest[:dim], (low, high), *rest[dim + 1 :]))
        rest[dim] = (first, last)
    return left


def difference(region: Region, taken: Iterable[Region]) -> list[Region]:
    """Returns the part of `region` that is in none of `taken`, as boxes that do not overlap."""
    left = [region]
    for hole in taken:
        left = [part for box in left for part in _without(box, hole)]
    return left


def _without(region: Region, hole: Region) -> list[Region]:
    common = intersection(region, hole)
    return [region] if common is None else remainder(region, common)


def merged(regions: Iterable[Region]) -> list[Region]:
    """Returns the same elements in fewer boxes, sorted: neighbours that share a whole side become one."""
    boxes, before = sorted(regions), 0
    while len(boxes) != before:
        before = len(boxes)
        for dim in range(len(boxes[0]) if boxes else 0):
            boxes = _merged_along(boxes, dim)
    return sorted(boxes)


def _merged_along(boxes: list[Region], dim: int) -> list[Region]:
    joined: list[Region] = []
    for box in sorted(boxes, key=lambda box: (box[:dim], box[dim + 1 :], box[dim])):
        last = joined[-1] if joined else None
        if last and last[:dim] == box[:dim] and last[dim + 1 :] == box[dim + 1 :] and last[dim][1] == box[dim][0]:
            joined[-1] = (*box[:dim], (last[dim][0], box[dim][1]), *box[dim + 1 :])
        else:
            joined.append(box)
    return joined


def overlapping(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """Returns the first two regions that share an element; None where none do."""
    for index, region in enumerate(regions):
        for other in regions[:index]:
            if intersection(other, region) is not None:
                return other, region
    return None


def split(region: Region, limit: int) -> list[Region]:
    """Cuts a region into boxes of at most `limit` elements: blocks of rows, and a row that is too large by the same rule."""
    if num_elements(region) <= limit:
        return [region]
    (start, stop), inner = region[0], region[1:]
    row = num_elements(inner)
    if row > limit:
        return [((i, i + 1), *part) for i in range(start, stop) for part in split(inner, limit)]
    step = limit // row
    return [((i, min(i + step, stop)), *inner) for i in range(start, stop, step)]


def flat_regions(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """Returns the boxes that elements [start, stop) of the flattened tensor fill, in order: optimizers shard by flat ranges."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start, stop),)] if shape else [()]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        return [((last, last + 1), *inner) for inner in flat_regions(shape[1:], start - last * row, stop - last * row)]
    boxes: list[Region] = [
        ((first - 1, first), *inner) for inner in flat_regions(shape[1:], start - (first - 1) * row, row) if start < first * row
    ]
    if first < last:
        boxes.append(((first, last), *whole(shape[1:])))
    boxes += [((last, last + 1), *inner) for inner in flat_regions(shape[1:], 0, stop - last * row)]
    return boxes
