"""Pieces of named tensors, in which training engines, rollout engines, resharding and checkpoints describe weights.

Names and shapes are those of the Hugging Face checkpoint (`model.layers.0.mlp.experts.3.up_proj.weight`, unfused), whatever a
backend fuses or splits in memory.  A piece lies in a region: a half-open range for each dimension of the tensor's full shape.
Whatever a backend does to a weight (rows, columns, heads, experts, flat ranges of an optimizer) comes down to regions, so one
kind of code moves all of them; the arithmetic of regions is in the second half of this file.

A rollout engine may store the matrices of its linear layers quantized, as DeepSeek-V3's checkpoints do (arXiv 2412.19437,
section 3.3): a weight `x.weight` (out, in) is a matrix of that name in float8_e4m3fn, and its scales `x.weight_scale_inv`
(out / 128, in / 128, rounded up) are what a block's elements are multiplied by.  The scale of a block is its largest magnitude
/ 448, so every block uses the whole range.  Blocks are counted from the matrix's first element, and a trainer's pieces may cut
them, so a whole matrix is quantized at once, where it has arrived (see sharding_manager.manager); the end of this file does that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Region = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension, 0 <= start <= stop; () is a scalar."""

BLOCK = 128
"""Rows and columns of a block."""
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
RELATIVE_ERROR = 2.0**-4
"""The largest error of an element by its own magnitude: half of the step of 3 bits of mantissa."""
STEP_BELOW = 2.0**-10
"""The largest error of an element in units of its block's scale, where it is smaller than 2^-6 of these: half of the smallest
step, 2^-9."""


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


# --- quantized weights ----------------------------------------------------------------------------------------------------------


def scales_name(name: str) -> str:
    """Returns the name of a quantized weight's scales."""
    return f"{name}_scale_inv"


def is_quantized(weights: Iterable[Piece | PieceInfo]) -> bool:
    """Returns whether some of the weights are stored in eight bits."""
    return any((weight.tensor.dtype if isinstance(weight, Piece) else weight.dtype) == FP8 for weight in weights)


def num_blocks(size: int) -> int:
    """Returns the number of blocks along a dimension with so many elements."""
    return -(-size // BLOCK)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a matrix (out, in) in eight bits, rounded to nearest, and its scales (blocks of out, blocks of in) in float32.

    For an element x of a block with scale s the stored number differs from x by at most max(2^-4 |x|, 2^-10 s), but for the
    rounding of float32.  A block of zeros has the scale 1.  An element that is not finite spoils its block, and stays visible.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(num_blocks(rows), BLOCK, num_blocks(columns), BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    numbers = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(FP8)
    return numbers.view(padded.shape)[:rows, :columns].contiguous(), scales


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrix that `quantize` has stored, computed in float32 and cast to `dtype`."""
    rows, columns = weight.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() * spread).to(dtype)
