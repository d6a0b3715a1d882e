"""One rank's part of a plan, run as often as the weights change.

Everything that moves is fingerprinted where it comes from, in the destination's dtype, while it passes; when all has arrived
the destination reads its live weights back and compares.  So a lost, late or misplaced message is noticed, and the first weight
it hit is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhub.protocol.weights.fingerprint import digests
from rlhub.protocol.weights.regions import num_elements, sizes, split
from rlhub.sharding_manager.held import Held
from rlhub.sharding_manager.links import Links
from rlhub.sharding_manager.plan import Plan, Transfer
from rlhub.sharding_manager.schedule import Message, Round
from rlhub.sharding_manager.transports.base import RankRound, Transport

COPY_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Copies inside a process go in blocks of about this size: on CPU the fingerprint finds the block in the cache, on a GPU a block
costs the launch of a dozen kernels and, while it is copied, eight bytes an element."""


@dataclass(slots=True, kw_only=True)
class RankPlan:
    """What one process does.  copies: inside it, in blocks.  rounds: with peers, by their ranks in the group."""

    copies: list[Transfer]
    rounds: list[RankRound]

    @property
    def sent(self) -> dict[int, list[Transfer]]:
        """To each peer, in the order in which both ends count them."""
        return _by_peer(pair for this in self.rounds for pair in this.sends)

    @property
    def received(self) -> dict[int, list[Transfer]]:
        return _by_peer(pair for this in self.rounds for pair in this.receives)


def _by_peer(messages: Iterable[tuple[int, Message]]) -> dict[int, list[Transfer]]:
    found: dict[int, list[Transfer]] = {}
    for peer, message in messages:
        found.setdefault(peer, []).extend(message.transfers)
    return found


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
    """The part of the process that is source rank `source` and destination rank `destination` (None: not of that side).

    *_peers: the group rank of each source and destination rank.  device: the kind where the weights are.
    """
    mine: list[RankRound] = []
    for this in rounds:
        sends = [] if source is None else [(destination_peers[m.destination], m) for m in this.sent_by(source)]
        receives = [] if destination is None else [(source_peers[m.source], m) for m in this.received_by(destination)]
        mine.append(RankRound(sends=sends, receives=receives))
    copies = [] if destination is None else [part for copy in plan.copies[destination] for part in _blocks(copy, device)]
    return RankPlan(copies=copies, rounds=mine)


def _blocks(copy: Transfer, device: str) -> Iterator[Transfer]:
    most = COPY_ELEMENTS[device]
    if num_elements(copy.region) <= most:
        yield copy
        return
    for region in split(copy.region, most):
        yield replace(copy, region=region)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """differing: names whose live values are not what was sent, in the plan's order.  values: (name and region, fingerprint)
    of what this rank's engine holds now."""

    differing: list[str]
    values: list[tuple[str, int]]


class Execution:
    """Runs a RankPlan.  links: None where this process is alone.  check: False moves without fingerprints."""

    def __init__(self, plan: RankPlan, transport: Transport | None, links: Links | None, *, check: bool) -> None:
        self._plan, self._transport, self._links, self._check = plan, transport, links, check
        self._source: Held | None = None
        self._destination: Held | None = None

    @torch.no_grad()
    def run(self, source: Held, destination: Held) -> Outcome:
        """Move everything and compare.  Every process of the links calls it; blocks."""
        source = self._source = source.or_known(self._source)
        destination = self._destination = destination.or_known(self._destination)
        wanted = self._copy(source, destination)
        sent: dict[int, list[int]] = {}
        if self._transport is not None:
            self._transport.run(
                self._plan.rounds,
                lambda message, buffer: self._pack(message, buffer, source, sent),
                lambda message, buffer: _unpack(message, buffer, destination),
            )
        if not self._check:
            return Outcome(differing=[], values=[])
        transfers = list(self._plan.copies)
        for peer, values in self._exchange(sent).items():
            transfers += self._plan.received[peer]
            wanted += values
        held = digests(destination.contiguous(transfer.name, transfer.region) for transfer in transfers)
        differing = [t.name for t, one, other in zip(transfers, wanted, held, strict=True) if one != other]
        return Outcome(differing=differing, values=[(f"{t.name}{t.region}", v) for t, v in zip(transfers, held, strict=True)])

    def _copy(self, source: Held, destination: Held) -> list[int]:
        """Inside the process; returns the fingerprints of what was copied."""
        copied = (_copy_block(transfer, source, destination) for transfer in self._plan.copies)
        if self._check:
            return digests(copied)
        for _ in copied:
            pass
        return []

    def _pack(self, message: Message, buffer: Tensor, source: Held, sent: dict[int, list[int]]) -> None:
        parts = []
        for transfer, part in _parts(message, buffer):
            source.read(transfer.name, transfer.region, part)
            parts.append(part)
        if self._check:
            sent.setdefault(message.destination, []).extend(digests(parts))

    def _exchange(self, sent: dict[int, list[int]]) -> dict[int, list[int]]:
        """Fingerprints of what each peer sent here, in the order of its messages."""
        if self._links is None:
            return {}
        peers = {m.destination: peer for this in self._plan.rounds for peer, m in this.sends}
        sends = [(peers[destination], torch.tensor(values)) for destination, values in sent.items()]
        receives = [(peer, torch.empty(len(t), dtype=torch.int64)) for peer, t in self._plan.received.items()]
        for pending in self._links.exchange(sends, receives):
            pending.wait()
        return {peer: values.tolist() for peer, values in receives}


def _copy_block(transfer: Transfer, source: Held, destination: Held) -> Tensor:
    """Copy inside the process; what was copied, contiguous and in the destination's dtype."""
    target = destination.view(transfer.name, transfer.region)
    view = source.view(transfer.name, transfer.region)
    if target is not None and view is not None and view.is_contiguous() and view.dtype == target.dtype:
        target.copy_(view)
        return view.to(target.device)
    device = destination.device(transfer.name)
    block = torch.empty(sizes(transfer.region), dtype=transfer.dtype, device=device)
    source.read(transfer.name, transfer.region, block)
    destination.write(transfer.name, transfer.region, block)
    return block


def _parts(message: Message, buffer: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    """The places of the message's transfers in its bytes."""
    start = 0
    for transfer in message.transfers:
        stop = start + transfer.num_bytes
        yield transfer, buffer[start:stop].view(transfer.dtype).view(sizes(transfer.region))
        start = stop


def _unpack(message: Message, buffer: Tensor, destination: Held) -> None:
    for transfer, part in _parts(message, buffer):
        destination.write(transfer.name, transfer.region, part)
