"""Boxes inside tensors: the arithmetic behind resharding and checkpoints.

A region is a half-open range for each dimension of a named tensor's full shape.  Whatever a backend does to a weight (rows,
columns, heads, experts, flat ranges of an optimizer) comes down to regions, so one kind of code moves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

Region = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension, 0 <= start <= stop; () is a scalar."""


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def sizes(region: Region) -> tuple[int, ...]:
    """The shape of what is in the region."""
    return tuple(stop - start for start, stop in region)


def num_elements(region: Region) -> int:
    """Elements in the region; 1 for a scalar."""
    return math.prod(stop - start for start, stop in region)


def intersection(a: Region, b: Region) -> Region | None:
    """What both have; None where that is nothing."""
    common = tuple((max(low_a, low_b), min(high_a, high_b)) for (low_a, high_a), (low_b, high_b) in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def relative(inner: Region, outer: Region) -> Region:
    """`inner` in coordinates that start at the first corner of `outer`."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(inner, outer, strict=True))


def moved(region: Region, origin: Region) -> Region:
    """The inverse of `relative`: a region inside `origin`, in the coordinates that `origin` is given in."""
    return tuple((start + base, stop + base) for (start, stop), (base, _) in zip(region, origin, strict=True))


def take(tensor: Tensor, region: Region) -> Tensor:
    """The region of a tensor, as a view."""
    return tensor[tuple(slice(start, stop) for start, stop in region)] if region else tensor


def remainder(region: Region, taken: Region) -> list[Region]:
    """What is left of `region` without `taken` (inside it), in at most two boxes a dimension."""
    left: list[Region] = []
    rest = list(region)
    for dim, ((start, stop), (first, last)) in enumerate(zip(region, taken, strict=True)):
        for low, high in ((start, first), (last, stop)):
            if low < high:
                left.append((*rest[:dim], (low, high), *rest[dim + 1 :]))
        rest[dim] = (first, last)
    return left


def flat_regions(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """The boxes that elements [start, stop) of the flattened tensor fill, in order: optimizers shard by flat ranges."""
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
