"""A plan in rounds that fit the transport's buffers, and one process's part of them.

In each round no rank sends, and no rank receives, more than one bucket, so a process that does both needs at most two.  There
is one message for each source, destination and round.  Both ends list the same transfers in the same order and cut them into
the same parts, so each end may decide alone whether a part needs a buffer there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rlhub.errors import ReshardError
from rlhub.protocol.weights.pieces import num_elements, sizes, split
from rlhub.sharding_manager.plan import Plan, Transfer
from rlhub.utils.collector import without_collector

PARTS_OF_BUCKET = 4  # a transfer is cut to at most 1/4 of a bucket, so that a round is filled to three quarters or more

PART_BYTES = 1 << 20
"""A transfer of at least this size travels by itself: if it is contiguous, no end copies it.  Smaller transfers are packed,
because a message costs more than a copy of one."""

COPY_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Copies inside a process go in blocks of about this size.  On CPU the fingerprint then finds the block in the cache; on a GPU
a block costs the launch of a dozen kernels and, while it is copied, eight bytes per element."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Part:
    """Transfers that travel as one piece of memory, packed without gaps."""

    transfers: list[Transfer]

    @property
    def num_bytes(self) -> int:
        return sum(transfer.num_bytes for transfer in self.transfers)

    def tensors(self, memory: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
        """Yields the transfers with their tensors in the part's memory, which is given as bytes."""
        start = 0
        for transfer in self.transfers:
            stop = start + transfer.num_bytes
            yield transfer, memory[start:stop].view(transfer.dtype).view(sizes(transfer.region))
            start = stop


@dataclass(slots=True, kw_only=True, frozen=True)
class Message:
    """Everything that one source rank sends to one destination rank in a round.

    transfers: the large ones first, then those that are packed, with the widest dtype first, so that each starts at a multiple
    of its element size.
    """

    source: int
    destination: int
    transfers: list[Transfer]

    @property
    def num_bytes(self) -> int:
        return sum(transfer.num_bytes for transfer in self.transfers)

    @property
    def parts(self) -> list[Part]:
        """Returns the transfers in their order: each large one by itself, and the others together."""
        large = [transfer for transfer in self.transfers if transfer.num_bytes >= PART_BYTES]
        packed = self.transfers[len(large) :]
        return [Part(transfers=[transfer]) for transfer in large] + ([Part(transfers=packed)] if packed else [])


@dataclass(slots=True, kw_only=True, frozen=True)
class Round:
    """Messages that travel together, sorted by source and destination, at most one for each pair."""

    messages: list[Message]

    def sent_by(self, source: int) -> list[Message]:
        return [message for message in self.messages if message.source == source]

    def received_by(self, destination: int) -> list[Message]:
        return [message for message in self.messages if message.destination == destination]


@dataclass(slots=True, kw_only=True)
class RankRound:
    """The messages that a process sends and receives in one round, each with the rank of the peer in the group."""

    sends: list[tuple[int, Message]]
    receives: list[tuple[int, Message]]


@dataclass(slots=True, kw_only=True)
class RankPlan:
    """One process's part of a plan.

    copies: the transfers inside the process, in blocks.
    rounds: the messages to and from peers.
    """

    copies: list[Transfer]
    rounds: list[RankRound]

    @property
    def sent(self) -> dict[int, list[Transfer]]:
        """Returns the transfers to each peer, in the order in which both ends count them."""
        return _by_peer(pair for this in self.rounds for pair in this.sends)

    @property
    def received(self) -> dict[int, list[Transfer]]:
        """Returns the transfers from each peer, in the order in which both ends count them."""
        return _by_peer(pair for this in self.rounds for pair in this.receives)


def _by_peer(messages: Iterable[tuple[int, Message]]) -> dict[int, list[Transfer]]:
    transfers: dict[int, list[Transfer]] = {}
    for peer, message in messages:
        transfers.setdefault(peer, []).extend(message.transfers)
    return transfers


def rank_plan(
    plan: Plan,
    rounds: Sequence[Round],
    *,
    source: int | None,
    destination: int | None,
    source_peers: Sequence[int],
    destination_peers: Sequence[int],
    device: str = "cpu",
) -> RankPlan:
    """Returns the part of the process that is source rank `source` and destination rank `destination`; None means that it is
    not of that side.

    source_peers, destination_peers: the group rank of each source and destination rank.
    device: the kind of device that has the weights.
    """
    mine: list[RankRound] = []
    for this in rounds:
        sends = [] if source is None else [(destination_peers[m.destination], m) for m in this.sent_by(source)]
        receives = [] if destination is None else [(source_peers[m.source], m) for m in this.received_by(destination)]
        mine.append(RankRound(sends=sends, receives=receives))
    copies = [] if destination is None else [part for copy in plan.copies[destination] for part in _blocks(copy, device)]
    return RankPlan(copies=copies, rounds=mine)


def _blocks(copy: Transfer, device: str) -> Iterator[Transfer]:
    limit = COPY_ELEMENTS[device]
    if num_elements(copy.region) <= limit:
        yield copy
        return
    for region in split(copy.region, limit):
        yield replace(copy, region=region)


@without_collector()
def schedule(plan: Plan, bucket_bytes: int) -> list[Round]:
    """Returns the plan's receives in few rounds.  Copies inside a process are not part of it.

    A transfer that does not fit is cut into blocks of rows, and a row larger than a bucket along the next dimension.  Pairs
    whose ranks have the most left to do go first, so that no rank is left with work for rounds of its own.
    """
    queues = _queues(plan, bucket_bytes)
    to_send, to_receive = Counter[int](), Counter[int]()
    for (source, destination), queue in queues.items():
        for _, num_bytes in queue:
            to_send[source] += num_bytes
            to_receive[destination] += num_bytes
    rounds = []
    while queues:
        sent, received = Counter[int](), Counter[int]()
        messages = []
        for pair in sorted(queues, key=lambda pair: (-max(to_send[pair[0]], to_receive[pair[1]]), pair)):
            source, destination = pair
            left = bucket_bytes - max(sent[source], received[destination])
            transfers, num_bytes = _fill(queues[pair], left)
            if transfers:
                sent[source] += num_bytes
                received[destination] += num_bytes
                messages.append(Message(source=source, destination=destination, transfers=transfers))
                if not queues[pair]:
                    del queues[pair]
        to_send -= sent
        to_receive -= received
        rounds.append(Round(messages=sorted(messages, key=lambda message: (message.source, message.destination))))
    return rounds


_Queue = deque[tuple[Transfer, int]]


def _queues(plan: Plan, bucket_bytes: int) -> dict[tuple[int, int], _Queue]:
    """Returns the transfers of each pair of ranks, cut to size, with their bytes."""
    queues: dict[tuple[int, int], _Queue] = {}
    for received in plan.receives:
        for transfer in received:
            queue = queues.setdefault((transfer.source, transfer.destination), deque())
            num_bytes = transfer.num_bytes
            if num_bytes <= bucket_bytes // PARTS_OF_BUCKET:
                queue.append((transfer, num_bytes))
            else:
                queue.extend((part, part.num_bytes) for part in _cut(transfer, bucket_bytes))
    return queues


def _cut(transfer: Transfer, bucket_bytes: int) -> Iterator[Transfer]:
    size = transfer.dtype.itemsize
    if size > bucket_bytes:
        raise ReshardError(
            f"one element of {transfer.name} has {size} bytes, a bucket {bucket_bytes}: make the bucket larger",
            weight=transfer.name,
        )
    limit = max(1, bucket_bytes // PARTS_OF_BUCKET // size)
    row = num_elements(transfer.region[1:])
    if limit < row <= bucket_bytes // size:  # better whole rows than well filled rounds
        limit = row
    for region in split(transfer.region, limit):
        yield replace(transfer, region=region)


def _fill(queue: _Queue, limit: int) -> tuple[list[Transfer], int]:
    """Removes from the queue, in order, the transfers that fit into `limit` bytes; returns them and their bytes."""
    transfers, total = [], 0
    while queue and total + queue[0][1] <= limit:
        transfer, num_bytes = queue.popleft()
        transfers.append(transfer)
        total += num_bytes
    return sorted(transfers, key=lambda transfer: (transfer.num_bytes < PART_BYTES, -transfer.dtype.itemsize)), total
