"""Messages over a process group (gloo or NCCL): any machines.

One packed message for each pair and round.  Two buffers for sending and two for receiving: while a round is unpacked the next
one travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhub.sharding_manager.links import Links, Pending
from rlhub.sharding_manager.transports.base import Packer, RankRound, Transport, buffer_bytes, places


class CollectiveTransport(Transport):
    """memory_bytes: of all four buffers together."""

    def __init__(self, links: Links, memory_bytes: int) -> None:
        self._links = links
        self.round_bytes = memory_bytes // 4

    def run(self, rounds: Sequence[RankRound], pack: Packer, unpack: Packer) -> None:
        device = self._links.device
        sending = _pair(max((buffer_bytes(r.sends) for r in rounds), default=0), device)
        receiving = _pair(max((buffer_bytes(r.receives) for r in rounds), default=0), device)
        under_way: list[list[Pending]] = []
        for number in range(len(rounds) + 1):
            if number < len(rounds):
                this = number % 2
                under_way.append(self._start(rounds[number], sending[this], receiving[this], pack))
            if number:
                done = rounds[number - 1]
                for pending in under_way[number - 1]:
                    pending.wait()
                buffer = receiving[(number - 1) % 2]
                for (_, message), place in zip(done.receives, places(done.receives), strict=True):
                    unpack(message, buffer[place])

    def _start(self, this: RankRound, sending: Tensor, receiving: Tensor, pack: Packer) -> list[Pending]:
        receives = [(peer, receiving[place]) for (peer, _), place in zip(this.receives, places(this.receives), strict=True)]
        sends = []
        for (peer, message), place in zip(this.sends, places(this.sends), strict=True):
            pack(message, sending[place])
            sends.append((peer, sending[place]))
        return self._links.exchange(sends, receives) if sends or receives else []


def _pair(num_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return first, second
