"""Messages of a transfer over a process group: gloo between CPUs, NCCL between GPUs, on any machines.

The transport knows buffers and ranks, not weights: it calls `pack` to fill a message and `unpack` to empty one.  There is one
packed message for each pair of ranks and round.  Two buffers for sending and two for receiving take turns, so that one round
travels while the round before it is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhub.sharding_manager.peers import Peers, PendingMessage
from rlhub.sharding_manager.schedule import Message, RankRound

ALIGNMENT = 16
"""Messages start at multiples of this many bytes, so that their tensors may be of any dtype."""

Packer = Callable[[Message, Tensor], None]
"""It gets a message and the message's bytes as a uint8 buffer."""


class Transport:
    """Carries the messages of a schedule.

    memory_bytes: the size of all four buffers together.  round_bytes: what a process may send, and may receive, in one round:
    the bucket to make the schedule with.
    """

    def __init__(self, peers: Peers, memory_bytes: int) -> None:
        self._peers = peers
        self.round_bytes = memory_bytes // 4

    def run(self, rounds: Sequence[RankRound], pack: Packer, unpack: Packer) -> None:
        """Sends and receives everything.  Every process of the group calls it with its part of the same rounds, and it blocks
        until all messages are unpacked.

        Raises WorkerDiedError naming the peer that is gone, DeadlineError for one that does not answer.
        """
        device = self._peers.device
        sending = _pair(max((_buffer_bytes(this.sends) for this in rounds), default=0), device)
        receiving = _pair(max((_buffer_bytes(this.receives) for this in rounds), default=0), device)
        started: list[list[PendingMessage]] = []
        for number in range(len(rounds) + 1):
            if number < len(rounds):
                this = number % 2
                started.append(self._start(rounds[number], sending[this], receiving[this], pack))
            if number:
                done = rounds[number - 1]
                for pending in started[number - 1]:
                    pending.wait()
                buffer = receiving[(number - 1) % 2]
                for (_, message), place in zip(done.receives, _places(done.receives), strict=True):
                    unpack(message, buffer[place])

    def _start(self, this: RankRound, sending: Tensor, receiving: Tensor, pack: Packer) -> list[PendingMessage]:
        receives = [(peer, receiving[place]) for (peer, _), place in zip(this.receives, _places(this.receives), strict=True)]
        sends = []
        for (peer, message), place in zip(this.sends, _places(this.sends), strict=True):
            pack(message, sending[place])
            sends.append((peer, sending[place]))
        return self._peers.exchange(sends, receives) if sends or receives else []


def aligned(num_bytes: int) -> int:
    """Returns the next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _places(messages: Sequence[tuple[int, Message]]) -> list[slice]:
    """Returns where each message lies in a common buffer."""
    places, start = [], 0
    for _, message in messages:
        places.append(slice(start, start + message.num_bytes))
        start += aligned(message.num_bytes)
    return places


def _buffer_bytes(messages: Sequence[tuple[int, Message]]) -> int:
    """Returns the size of the buffer that `_places` needs."""
    return sum(aligned(message.num_bytes) for _, message in messages)


def _pair(num_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return first, second
