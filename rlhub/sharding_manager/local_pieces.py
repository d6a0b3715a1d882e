"""The pieces of weights that one side of a transfer has in this process, read and written by name and region.

A region may span several pieces, for example those of a rank's shard of a fused weight.  LocalPieces cuts it along them, so
that plans and transports need not know how a backend stores its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlhub.errors import EngineError
from rlhub.protocol.weights.pieces import Piece, PieceInfo, Region, intersection, num_elements, relative, sizes, take


class LocalPieces:
    """The pieces by name, without the empty ones.

    It caches the views that it finds, and lives for one update: between updates an engine may free its weights' memory, which
    views would keep alive.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        self._views: dict[tuple[str, Region], Tensor | None] = {}
        self._cuts: dict[tuple[str, Region], list[tuple[Region, Tensor]]] = {}
        for piece in pieces:
            if num_elements(piece.region):
                self._pieces.setdefault(piece.name, []).append(piece)

    def infos(self) -> list[PieceInfo]:
        """Returns the descriptions of all pieces."""
        return [piece.info for pieces in self._pieces.values() for piece in pieces]

    def device(self, name: str) -> torch.device:
        """Returns the device of the tensor's pieces."""
        return self._pieces[name][0].tensor.device

    def view(self, name: str, region: Region) -> Tensor | None:
        """Returns the region as one live view, or None if it spans several pieces."""
        key = (name, region)
        if key not in self._views:
            self._views[key] = self._find(name, region)
        return self._views[key]

    def _find(self, name: str, region: Region) -> Tensor | None:
        for piece in self._pieces.get(name, ()):
            if intersection(region, piece.region) == region:
                return take(piece.tensor, relative(region, piece.region))
        return None

    def read(self, name: str, region: Region, out: Tensor) -> None:
        """Copies the region into `out`, which has the region's sizes, and casts to its dtype."""
        view = self.view(name, region)
        if view is not None:
            out.copy_(view)
            return
        for part, view in self._parts(name, region):
            take(out, part).copy_(view)

    def write(self, name: str, region: Region, values: Tensor) -> None:
        """Copies `values` into the region; the inverse of `read`."""
        view = self.view(name, region)
        if view is not None:
            view.copy_(values)
            return
        for part, view in self._parts(name, region):
            view.copy_(take(values, part))

    def contiguous(self, name: str, region: Region) -> Tensor:
        """Returns the region's elements in row-major order: a live view if memory has that order, else a copy."""
        view = self.view(name, region)
        if view is not None:
            return view.contiguous()
        pieces = self._pieces[name]
        out = torch.empty(sizes(region), dtype=pieces[0].tensor.dtype, device=pieces[0].tensor.device)
        self.read(name, region, out)
        return out

    def memory(self, name: str, region: Region, dtype: torch.dtype) -> Tensor | None:
        """Returns the region's live memory as bytes, or None if it is not in row-major order or not in `dtype`."""
        view = self.view(name, region)
        if view is None or view.dtype != dtype or not view.is_contiguous():
            return None
        return view.view(-1).view(torch.uint8)

    def _parts(self, name: str, region: Region) -> list[tuple[Region, Tensor]]:
        """Returns pairs of (part in coordinates of the region, live view) that together make up the region."""
        key = (name, region)
        if key not in self._cuts:
            self._cuts[key] = list(self._cut(name, region))
        return self._cuts[key]

    def _cut(self, name: str, region: Region) -> Iterator[tuple[Region, Tensor]]:
        covered = 0
        for piece in self._pieces.get(name, ()):
            common = intersection(region, piece.region)
            if common is not None:
                covered += num_elements(common)
                yield relative(common, region), take(piece.tensor, relative(common, piece.region))
        if covered != num_elements(region):
            raise EngineError(
                f"{name} {region} is not in this process any more as it was when the transfer was planned: an engine was built "
                "again in another layout; build its sharding manager again too"
            )
