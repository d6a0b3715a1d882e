"""One copy of the rollout engine's weights for all ranks of a machine that generate on its CPUs.

Copies of their own would cost the machine their memory, and every update the writing of each.  Ranks whose engines hold the same
weights map one segment instead.  In an update each answers for a part of it, as a tensor-parallel rank does for its slice: it
writes that part and reads it back.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlhub.engines.rollout.base import RolloutEngine
from rlhub.errors import WeightMismatchError
from rlhub.protocol.weights.pieces import Piece
from rlhub.sharding_manager.layout_exchange import encode_info, this_node
from rlhub.sharding_manager.links import Links
from rlhub.utils.shared_segments import new_segment_path, open_segment

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
"""Blocks begin at pages, as large allocations do."""


class _Place(NamedTuple):
    """Where a piece of the weights begins, counted from the start of the segment, and how it lies there."""

    name: str
    start: int
    stride: tuple[int, ...]


class SharedWeights:
    """One a rank; `share` makes it.  index, size: which of how many parts this rank answers for."""

    def __init__(self, links: Links, segment: Tensor, places: Sequence[_Place], *, index: int, size: int) -> None:
        self._links, self._segment, self._places = links, segment, list(places)
        self.index, self.size = index, size

    @classmethod
    def share(cls, links: Links, rollout: RolloutEngine) -> SharedWeights | None:
        """Move the engine's weights into memory that it shares with every engine of this machine that holds the same.

        Every rank calls it, inside the engine's `overwriting`, when all engines hold the same policy.  None, on all ranks,
        where no engine of the job shares with another, or one cannot have the memory.  (An engine that alone of all shares
        with no other keeps its memory, and answers for all of it.)
        """
        blocks = rollout.weight_memory()
        starts, total = _arrange(blocks)
        places = _places(rollout.live_weights(), blocks, starts) if blocks else []
        sharers = _sharers(links, _description(rollout, blocks, places))
        if sharers is None:
            return None
        leader, alone = sharers[0], len(sharers) == 1
        segment = _common_segment(links, leader, 0 if alone else total)
        if segment is None:
            logger.warning(
                "ranks of one machine keep their own copies of the rollout engine's weights: no shared memory for %d MiB under "
                "/dev/shm (in a container: --shm-size)",
                total >> 20,
            )
            return None
        shared = [] if alone else [segment[start : start + len(block)] for start, block in zip(starts, blocks, strict=True)]
        if shared and links.rank == leader:
            for block, copy in zip(blocks, shared, strict=True):
                copy.copy_(block)
        links.minimum(0)  # the leader has written before anybody reads
        if shared:
            rollout.move_weights(shared)
        return cls(links, segment, places, index=sharers.index(links.rank), size=len(sharers))

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """This rank's part of each piece: rows of the first dimension, cut as FSDP2 cuts a parameter for as many ranks."""
        for piece in pieces:
            if piece.region:
                (first, stop), *rest = piece.region
                rows = -(-(stop - first) // self.size)
                low = min(first + rows * self.index, stop)
                high = min(low + rows, stop)
                part = piece.tensor[low - first : high - first]
                yield Piece(name=piece.name, tensor=part, shape=piece.shape, region=((low, high), *rest))
            elif self.index == 0:
                yield piece

    @contextmanager
    def writing(self, pieces: Iterable[Piece]) -> Iterator[None]:
        """Around an update's writes on every rank, inside the engine's `overwriting`: none begins before all engines are idle,
        and when this ends all have written.

        pieces: the engine's live weights.  Raises WeightMismatchError, on every rank, for the first weight that some rank's
        engine does not read from the shared memory any more.
        """
        first = self._links.minimum(self._first_moved(pieces))
        if first < len(self._places):
            name = self._places[first].name
            raise WeightMismatchError(
                f"a rollout engine has moved {name} out of the memory that ranks of this machine share: other ranks' updates "
                "would not reach it; set rollout.share_weights=false",
                weight=name,
            )
        yield
        self._links.minimum(0)

    def _first_moved(self, pieces: Iterable[Piece]) -> int:
        if self.size == 1:
            return len(self._places)
        base = self._segment.data_ptr()
        places = (_Place(piece.name, piece.tensor.data_ptr() - base, piece.tensor.stride()) for piece in pieces)
        moved = (number for number, (now, then) in enumerate(zip(places, self._places, strict=True)) if now != then)
        return next(moved, len(self._places))


def _arrange(blocks: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each block begins in the segment, and the segment's size."""
    starts, total = [], 0
    for block in blocks:
        starts.append(total)
        total += -(-len(block) // ALIGNMENT) * ALIGNMENT
    return starts, total


def _places(pieces: Iterable[Piece], blocks: Sequence[Tensor], starts: Sequence[int]) -> list[_Place]:
    spans = [(block.data_ptr(), block.data_ptr() + len(block), start) for block, start in zip(blocks, starts, strict=True)]
    found = []
    for piece in pieces:
        address = piece.tensor.data_ptr()
        start = next(start + address - low for low, high, start in spans if low <= address < high)
        found.append(_Place(piece.name, start, piece.tensor.stride()))
    return found


def _description(rollout: RolloutEngine, blocks: Sequence[Tensor], places: Sequence[_Place]) -> str:
    """Equal for engines that can share: of one machine, with the same parts of the same weights at the same places."""
    if not blocks:
        return ""
    pieces = [encode_info(piece.info) for piece in rollout.live_weights()]
    layout = [[len(block) for block in blocks], places, pieces]
    return f"{this_node()} {hashlib.sha256(json.dumps(layout).encode()).hexdigest()}"


def _sharers(links: Links, description: str) -> list[int] | None:
    """The ranks that share with this one, itself among them; None where no rank of the job shares with another."""
    descriptions = [data.decode() for data in links.all_gather_bytes(description.encode())]
    groups: dict[str, list[int]] = {}
    for rank, other in enumerate(descriptions):
        groups.setdefault(other or f"rank {rank}", []).append(rank)
    if len(groups) == links.size:
        return None
    return groups[description or f"rank {links.rank}"]


def _common_segment(links: Links, leader: int, size: int) -> Tensor | None:
    """The leader's segment of `size` bytes (0: an empty tensor).  None on all ranks of the job where one cannot have its own."""
    path = new_segment_path()
    own = open_segment(path, create_bytes=size) if size and links.rank == leader else None
    try:
        paths = [Path(data.decode()) for data in links.all_gather_bytes(str(path).encode())]
        if not size:
            segment: Tensor | None = torch.empty(0, dtype=torch.uint8)
        else:
            segment = own if links.rank == leader else open_segment(paths[leader])
        everywhere = links.minimum(int(segment is not None)) == 1  # also: all have opened it
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
    return segment if everywhere else None
