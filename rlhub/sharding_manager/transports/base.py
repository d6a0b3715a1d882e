"""Transport: carries the messages of a schedule between processes.

A transport knows buffers and ranks, not weights: it calls `pack` to fill a message and `unpack` to empty one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlhub.sharding_manager.schedule import Message

ALIGNMENT = 16
"""Messages start at multiples of this many bytes, so that their tensors may be of any dtype."""

Packer = Callable[[Message, Tensor], None]
"""(message, its bytes as a uint8 buffer)."""


@dataclass(slots=True, kw_only=True)
class RankRound:
    """What this process sends and receives in one round: (rank of the peer in the group, message)."""

    sends: list[tuple[int, Message]] = field(default_factory=list)
    receives: list[tuple[int, Message]] = field(default_factory=list)


class Transport(ABC):
    """round_bytes: what a process may send, and may receive, in one round: the bucket to make the schedule with."""

    round_bytes: int

    @abstractmethod
    def run(self, rounds: Sequence[RankRound], pack: Packer, unpack: Packer) -> None:
        """Every process of the group calls it with its part of the same rounds; blocks until all messages are unpacked.

        Raises WorkerDiedError naming the peer that is gone, DeadlineError for one that does not answer.
        """


def places(messages: Sequence[tuple[int, Message]]) -> list[slice]:
    """Where each message lies in a shared buffer."""
    found, start = [], 0
    for _, message in messages:
        found.append(slice(start, start + message.num_bytes))
        start += -(-message.num_bytes // ALIGNMENT) * ALIGNMENT
    return found


def buffer_bytes(messages: Sequence[tuple[int, Message]]) -> int:
    """Size of the buffer that `places` needs."""
    return sum(-(-message.num_bytes // ALIGNMENT) * ALIGNMENT for _, message in messages)
