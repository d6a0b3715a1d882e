"""The messages of a transfer over a process group: gloo between CPUs, NCCL between GPUs, on any machines.

Large parts go straight from the memory of one engine's weights into that of the other's.  A part that must be cast, gathered
or spread passes through a buffer at that end.  Two buffers for sending and two for receiving take turns: one round travels
while the previous round is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.peers import Peers, PendingMessage
from rlhub.sharding_manager.schedule import Message, Part, RankRound

ALIGNMENT = 16
"""Parts start at multiples of this many bytes in a buffer, so that their tensors may have any dtype."""
ROUNDS_AHEAD = 2
BUFFERS = 2 * ROUNDS_AHEAD

OnSent = Callable[[int, Part, Tensor], None]
"""A callback with the rank of a peer, a part, and the part's bytes, which travel already and must not be changed."""


@dataclass(slots=True, kw_only=True)
class _Post:
    """A part that one peer sends or receives.  live: the memory of the weights themselves; None if the part needs a buffer."""

    peer: int
    part: Part
    live: Tensor | None


class Transport:
    """Carries the messages of a schedule.

    memory_bytes: the most memory that all buffers take together.
    round_bytes: the most bytes that a process may send, and may receive, in one round; the schedule is made with this bucket.
    """

    def __init__(self, peers: Peers, memory_bytes: int) -> None:
        self._peers = peers
        self.round_bytes = memory_bytes // BUFFERS

    def run(
        self,
        rounds: Sequence[RankRound],
        source: LocalPieces,
        destination: LocalPieces,
        *,
        on_sent: OnSent,
        meanwhile: Callable[[], None],
    ) -> None:
        """Sends and receives everything.  Every process of the group calls it with its part of the same rounds, and it blocks
        until all has arrived.

        meanwhile: called once, while the first rounds travel.  Raises WorkerDiedError naming the peer that is gone, and
        DeadlineError for one that does not answer.
        """
        sends = [_posts(this.sends, source) for this in rounds]
        receives = [_posts(this.receives, destination) for this in rounds]
        sending, receiving = self._buffers(sends), self._buffers(receives)
        started: list[list[PendingMessage]] = []

        def start() -> None:
            number = len(started)
            if number < len(rounds):
                arriving = _memory(receives[number], receiving[number % ROUNDS_AHEAD])
                leaving = _memory(sends[number], sending[number % ROUNDS_AHEAD])
                started.append(self._exchange(sends[number], leaving, receives[number], arriving, source))
                for post, memory in zip(sends[number], leaving, strict=True):
                    on_sent(post.peer, post.part, memory)

        for _ in range(ROUNDS_AHEAD):
            start()
        meanwhile()
        for number, posts in enumerate(receives):
            self._finish(started[number], posts, receiving[number % ROUNDS_AHEAD], destination)
            start()

    def _buffers(self, rounds: Sequence[Sequence[_Post]]) -> list[Tensor]:
        """Returns buffers that are large enough for the buffered parts of any round."""
        size = max((sum(aligned(post.part.num_bytes) for post in posts if post.live is None) for posts in rounds), default=0)
        return [torch.empty(size, dtype=torch.uint8, device=self._peers.device) for _ in range(ROUNDS_AHEAD)]

    def _exchange(
        self, sends: list[_Post], leaving: list[Tensor], receives: list[_Post], arriving: list[Tensor], source: LocalPieces
    ) -> list[PendingMessage]:
        """Fills the buffers of a round's parts and starts its messages."""
        for post, memory in zip(sends, leaving, strict=True):
            if post.live is None:
                for transfer, tensor in post.part.tensors(memory):
                    source.read(transfer.name, transfer.region, tensor)
        if not sends and not receives:
            return []
        return self._peers.exchange(
            [(post.peer, memory) for post, memory in zip(sends, leaving, strict=True)],
            [(post.peer, memory) for post, memory in zip(receives, arriving, strict=True)],
        )

    def _finish(self, pending: list[PendingMessage], posts: list[_Post], buffer: Tensor, destination: LocalPieces) -> None:
        """Waits for a round and unpacks its buffer."""
        for message in pending:
            message.wait()
        for post, memory in zip(posts, _memory(posts, buffer), strict=True):
            if post.live is None:
                for transfer, tensor in post.part.tensors(memory):
                    destination.write(transfer.name, transfer.region, tensor)


def aligned(num_bytes: int) -> int:
    """Returns the next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _posts(messages: Sequence[tuple[int, Message]], pieces: LocalPieces) -> list[_Post]:
    posts = []
    for peer, message in messages:
        for part in message.parts:
            first, *others = part.transfers
            live = None if others else pieces.memory(first.name, first.region, first.dtype)
            posts.append(_Post(peer=peer, part=part, live=live))
    return posts


def _memory(posts: Sequence[_Post], buffer: Tensor) -> list[Tensor]:
    """Returns the bytes of each part, in the weights themselves or in the buffer."""
    memory, start = [], 0
    for post in posts:
        if post.live is not None:
            memory.append(post.live)
            continue
        memory.append(buffer[start : start + post.part.num_bytes])
        start += aligned(post.part.num_bytes)
    return memory
