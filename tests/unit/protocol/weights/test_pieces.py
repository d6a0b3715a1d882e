"""Boxes against sets of elements: every function equals what the same operation does to a mask."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhub.protocol.weights.pieces import (
    Piece,
    Region,
    by_name,
    difference,
    flat_regions,
    intersection,
    merged,
    moved,
    num_elements,
    overlapping,
    relative,
    remainder,
    sizes,
    split,
    take,
    views,
    whole,
)

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)
quick = settings(max_examples=30, deadline=None, derandomize=True)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """One that is not empty."""
    corners = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in shape]
    return tuple((start, stop) for start, stop in corners)


def mask(shape: tuple[int, ...], regions: list[Region]) -> Tensor:
    """How often each element is in the regions."""
    count = torch.zeros(shape, dtype=torch.int64)
    for region in regions:
        take(count, region).add_(1)
    return count


@quick
@given(st.data())
def test_arithmetic_of_two_boxes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = intersection(a, b)
    assert torch.equal(mask(shape, [common] if common else []) if shape else mask((), [()]), mask(shape, [a]) * mask(shape, [b]))
    assert (overlapping([a, b]) is None) == (common is None)
    assert num_elements(a) == int(mask(shape, [a]).sum()) == torch.empty(sizes(a)).numel()
    assert torch.equal(mask(shape, difference(a, [b])), mask(shape, [a]) * (1 - mask(shape, [b])))
    if common is not None:
        assert moved(relative(common, a), a) == common
        assert torch.equal(mask(shape, [common, *remainder(a, common)]), mask(shape, [a]))


@quick
@given(st.data())
def test_merged_has_the_same_elements_in_no_more_boxes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES.filter(bool))
    parts = difference(whole(shape), data.draw(st.lists(boxes(shape), max_size=3)))
    parts = [piece for part in parts for piece in split(part, data.draw(st.integers(1, 20)))]
    fewer = merged(data.draw(st.permutations(parts)))
    assert torch.equal(mask(shape, fewer), mask(shape, parts)) and len(fewer) <= len(parts)
    assert overlapping(fewer) is None and fewer == sorted(fewer)


def test_neighbours_become_one_box_and_overlaps_stay_visible() -> None:
    assert merged([((4, 6), (0, 2)), ((0, 4), (0, 1)), ((0, 4), (1, 2))]) == [((0, 6), (0, 2))]
    assert merged([]) == [] and merged([()]) == [()]
    twice = [((0, 2), (0, 2)), ((0, 2), (0, 2))]
    assert overlapping(merged(twice)) == (twice[0], twice[0])
    assert overlapping(merged([((0, 3),), ((2, 4),)])) == (((0, 3),), ((2, 4),))


@quick
@given(st.data())
def test_split_covers_once_within_the_limit(data: st.DataObject) -> None:
    shape, limit = data.draw(SHAPES), data.draw(st.integers(1, 30))
    region = data.draw(boxes(shape))
    parts = split(region, limit)
    assert torch.equal(mask(shape, parts), mask(shape, [region]))
    assert max(num_elements(part) for part in parts) <= limit
    row = num_elements(region[1:])
    if region and row <= limit:  # whole rows, and as few blocks as possible
        assert all(part[1:] == region[1:] for part in parts)
        assert len(parts) == -(-sizes(region)[0] // (limit // row))


@quick
@given(st.data())
def test_flat_regions_are_the_flat_range_in_order(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    count = num_elements(whole(shape))
    start, stop = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    numbers = torch.arange(count).reshape(shape)
    parts = [take(numbers, region).reshape(-1) for region in flat_regions(shape, start, stop)]
    assert torch.cat([torch.arange(0), *parts]).tolist() == list(range(start, stop))


def test_views_of_several_pieces_fill_a_region_that_spans_them() -> None:
    full = torch.arange(24.0).reshape(6, 4)
    pieces = by_name(
        Piece(name="a", tensor=full[start : start + 2].clone(), shape=(6, 4), region=((start, start + 2), (0, 4)))
        for start in (4, 0, 2)
    )
    region = ((1, 5), (1, 3))
    out = torch.zeros(sizes(region))
    for view, place in views(pieces["a"], region):
        take(out, place).copy_(view)
        view.zero_()
    assert torch.equal(out, take(full, region))
    left = torch.cat([piece.tensor for piece in sorted(pieces["a"], key=lambda piece: piece.region)])
    assert int((left != full).sum()) == num_elements(region), "views are live"
