"""Messages through memory that all ranks of one machine map: the kernel copies nothing.

Each sender packs its messages into a segment under /dev/shm and each receiver unpacks straight out of it; the process group
carries only the word that a message is there, or is taken, so a peer that dies is noticed as in any other group.  The
segments' names are removed as soon as everyone has mapped them: whatever way the job ends, nothing stays behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rlhub.sharding_manager.links import Links, Pending
from rlhub.sharding_manager.transports.base import ALIGNMENT, Packer, RankRound, Transport, places
from rlhub.utils.shared_segments import new_segment_path, open_segment

HALVES = 2  # while one half of a segment is read the other is written
ROUND_BYTES = 8 << 20
"""Larger rounds do not fit the caches, and receivers would fetch from memory what was just packed."""
THERE, TAKEN = 1, 2  # tags of the words about a message


class SharedMemoryTransport(Transport):
    """For ranks of one machine that compute on CPUs; `create` makes one.  segments: every rank's, by rank."""

    def __init__(self, links: Links, segments: Sequence[Tensor], round_bytes: int) -> None:
        self._links, self._segments, self.round_bytes = links, segments, round_bytes

    @classmethod
    def create(cls, links: Links, memory_bytes: int, *, sends: bool) -> SharedMemoryTransport | None:
        """Every rank calls it.

        sends: whether this rank has anything to send, and so needs a segment of at most `memory_bytes`.  None, on all ranks,
        where one of them cannot have the memory (containers often give 64 MiB) or cannot open another's.
        """
        round_bytes = min(memory_bytes // HALVES, ROUND_BYTES)
        size = HALVES * (round_bytes + ALIGNMENT * links.size) if sends else HALVES
        path = new_segment_path()
        own = open_segment(path, create_bytes=size)
        try:
            names = [Path(os.fsdecode(name)) for name in links.all_gather_bytes(os.fsencode(path))]
            opened = [own if name == path else open_segment(name) for name in names]
            segments = [segment for segment in opened if segment is not None]
            everywhere = links.minimum(len(segments)) == links.size  # also: all have opened mine
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
        return cls(links, segments, round_bytes) if everywhere else None

    def run(self, rounds: Sequence[RankRound], pack: Packer, unpack: Packer) -> None:
        taken: list[list[Pending]] = []
        for number, this in enumerate(rounds):
            if number >= HALVES:
                _wait(taken[number - HALVES])
            told = self._offer(number, this, pack)
            told += self._take(this, unpack)
            words = [(peer, torch.empty(1, dtype=torch.int64)) for peer, _ in this.sends]
            taken.append(self._links.exchange([], words, tag=TAKEN) + told)
        for pending in taken[-HALVES:]:
            _wait(pending)

    def _offer(self, number: int, this: RankRound, pack: Packer) -> list[Pending]:
        """Pack, and tell each receiver where its message begins in this rank's segment."""
        own = self._segments[self._links.rank]
        base = number % HALVES * (len(own) // HALVES)
        words = []
        for (peer, message), place in zip(this.sends, places(this.sends), strict=True):
            start = base + place.start
            pack(message, own[start : base + place.stop])
            words.append((peer, torch.tensor([start])))
        return self._links.exchange(words, [], tag=THERE)

    def _take(self, this: RankRound, unpack: Packer) -> list[Pending]:
        words = [(peer, torch.empty(1, dtype=torch.int64)) for peer, _ in this.receives]
        told: list[Pending] = []
        for pending, (peer, word), (_, message) in zip(
            self._links.exchange([], words, tag=THERE), words, this.receives, strict=True
        ):
            pending.wait()
            start = int(word)
            unpack(message, self._segments[peer][start : start + message.num_bytes])
            told += self._links.exchange([(peer, word)], [], tag=TAKEN)
        return told


def _wait(pending: Sequence[Pending]) -> None:
    for one in pending:
        one.wait()
