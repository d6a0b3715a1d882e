"""Pieces of named tensors: what training engines, rollout engines, resharding and checkpoints say to each other about weights.

Names and shapes are those of the Hugging Face checkpoint (`model.layers.0.mlp.experts.3.up_proj.weight`, unfused), whatever a
backend fuses or splits in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.protocol.weights.regions import Region, intersection, num_elements, relative, sizes, take, whole


@dataclass(slots=True, kw_only=True, frozen=True)
class PieceInfo:
    """The description of a Piece, without its data.  shape: of the full tensor."""

    name: str
    shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return num_elements(self.region) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class Piece:
    """A part of a named tensor, held by this process.

    tensor: a live VIEW with the region's sizes (any strides): writing to it changes the backend's weight.  shape: of the
    full tensor.  A process may hold several pieces of one tensor; they do not overlap.
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
    """Yields what pieces of one tensor have of a region: a live view, and where it lies counted from the region's first corner.

    A planned transfer may span several pieces, for neighbours were merged: a copy goes piece by piece.
    """
    for piece in pieces:
        common = intersection(piece.region, region)
        if common is not None:
            yield take(piece.tensor, relative(common, piece.region)), relative(common, region)
