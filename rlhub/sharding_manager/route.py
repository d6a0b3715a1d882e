"""One process's part of a transfer, planned once and run whenever the weights change.

Everything that moves is fingerprinted at its source, in the destination's dtype; when all has arrived, the destination reads
its live weights back and compares.  So a lost, late or misplaced message is noticed, and every rank raises an error with the
name of the first weight that it affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.errors import WeightMismatchError
from rlhub.protocol.weights.fingerprint import combine, digests, nonfinite_names
from rlhub.protocol.weights.pieces import Piece, num_elements, sizes, whole
from rlhub.sharding_manager.layout_exchange import Member, check_devices, nodes_of
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.plan import Transfer, make_plan
from rlhub.sharding_manager.schedule import Part, RankPlan, rank_plan, schedule
from rlhub.sharding_manager.transport import Transport

BUFFER_BUCKETS = 2  # the memory of a process's message buffers during a planned update, in buckets

Agree = Callable[[int], int]
"""Returns the smallest of all ranks' numbers; every rank calls it."""


@dataclass(slots=True, kw_only=True)
class SyncReport:
    """The report of one update of the rollout engine's weights.

    bytes: the size of the full weights in the engine's dtype.
    wire_bytes: the bytes that this rank received from other processes, or wrote for them; None if the weights were streamed.
    fallbacks: the versions so far that a reader had to get in full because a delta was of no use.
    address: where replicas get this rank's part of the version; "" where it is in a folder that all reach.
    fingerprint: the fingerprint of this rank's parts, equal for equal weights that moved the same way; empty if the check is off
        or the process has no rollout engine's weights.
    """

    seconds: float = 0.0
    bytes: int
    num_weights: int
    version: int
    fingerprint: str
    wire_bytes: int | None = None
    fallbacks: int = 0
    address: str = ""


class Route:
    """This process's part of a transfer.

    names: the names of all weights, in an order that all ranks share.
    num_bytes: the size of the full weights in the engines' dtype.
    transport: None if this process is alone.
    check: False moves the weights without fingerprints.
    """

    def __init__(
        self, plan: RankPlan, peers: Peers | None, transport: Transport | None, *, names: list[str], num_bytes: int, check: bool
    ) -> None:
        self.plan, self._peers, self._transport, self._check = plan, peers, transport, check
        self._names, self._num_bytes = names, num_bytes
        self._wire_bytes = sum(transfer.num_bytes for received in plan.received.values() for transfer in received)

    @torch.no_grad()
    def run(self, source: Iterable[Piece], destination: Iterable[Piece], version: int) -> SyncReport:
        """Moves everything and compares.  Every process of the transfer calls it, and it blocks.

        source, destination: this process's live pieces of both sides, in the layout of the plan.  Raises WeightMismatchError,
        on every rank, for the first weight that differs on any.
        """
        here, live = LocalPieces(source), LocalPieces(destination)
        wanted: list[int] = []
        sent: dict[int, list[int]] = {}

        def copy() -> None:
            wanted.extend(self._copy(here, live))

        def on_sent(peer: int, part: Part, memory: Tensor) -> None:
            if self._check:
                sent.setdefault(peer, []).extend(digests(tensor for _, tensor in part.tensors(memory)))

        if self._transport is None:
            copy()
        else:
            self._transport.run(self.plan.rounds, here, live, on_sent=on_sent, meanwhile=copy)
        fingerprint = self._compare(live, wanted, sent) if self._check else ""
        return SyncReport(
            bytes=self._num_bytes,
            num_weights=len(self._names),
            version=version,
            fingerprint=fingerprint,
            wire_bytes=self._wire_bytes,
        )

    def _copy(self, source: LocalPieces, destination: LocalPieces) -> list[int]:
        """Copies the parts that stay inside the process and returns the fingerprints of the copies."""
        copied = (_copy_block(transfer, source, destination) for transfer in self.plan.copies)
        if self._check:
            return digests(copied)
        for _ in copied:
            pass
        return []

    def _compare(self, live: LocalPieces, wanted: list[int], sent: dict[int, list[int]]) -> str:
        """Reads the live weights back and compares them; returns the fingerprint of this rank's parts."""
        transfers = list(self.plan.copies)
        received = self.plan.received
        for peer, digests_there in self._exchange(sent).items():
            transfers += received[peer]
            wanted += digests_there
        arrived = digests(live.contiguous(transfer.name, transfer.region) for transfer in transfers)
        differing = [t.name for t, one, other in zip(transfers, wanted, arrived, strict=True) if one != other]
        raise_first(self._names, differing, self._peers.minimum if self._peers else alone)
        values = [(f"{t.name}{t.region}", value) for t, value in zip(transfers, arrived, strict=True)]
        return combine(values) if values else ""

    def _exchange(self, sent: dict[int, list[int]]) -> dict[int, list[int]]:
        """Returns the fingerprints of the parts that each peer sent to this process, in the order of its messages."""
        if self._peers is None:
            return {}
        sends = [(peer, torch.tensor(values)) for peer, values in sent.items()]
        receives = [(peer, torch.empty(len(t), dtype=torch.int64)) for peer, t in self.plan.received.items()]
        for pending in self._peers.exchange(sends, receives):
            pending.wait()
        return {peer: values.tolist() for peer, values in receives}


def make_route(peers: Peers | None, members: Sequence[Member], *, memory_bytes: int, check: bool) -> Route:
    """Plans the transfer from every process's description and returns this process's part.

    Every process calls it with the same members, of which it is one.  Raises ReshardError if the layouts do not fit together.

    peers: None if this process is alone.
    memory_bytes: the memory of this process's buffers.
    """
    check_devices(members)
    sources = [rank for rank, member in enumerate(members) if member.side != "receiver"]
    destinations = [rank for rank, member in enumerate(members) if member.side != "sender"]
    plan = make_plan(
        [members[rank].sources for rank in sources],
        [members[rank].destinations for rank in destinations],
        source_processes=sources,
        destination_processes=destinations,
        nodes=nodes_of(members),
    )
    transport = Transport(peers, memory_bytes) if peers else None
    rank = peers.rank if peers else 0
    mine = rank_plan(
        plan,
        schedule(plan, transport.round_bytes) if transport else [],
        source=sources.index(rank) if rank in sources else None,
        destination=destinations.index(rank) if rank in destinations else None,
        source_peers=sources,
        destination_peers=destinations,
        device=members[rank].device,
    )
    full = {info.name: info for member in members for info in member.destinations}
    num_bytes = sum(num_elements(whole(info.shape)) * info.dtype.itemsize for info in full.values())
    return Route(mine, peers, transport, names=sorted(full), num_bytes=num_bytes, check=check)


def alone(number: int) -> int:
    """Returns its argument: the Agree of a process without peers."""
    return number


def raise_first(names: list[str], differing: list[str], agree: Agree) -> None:
    """Raises WeightMismatchError on every rank for the first of `names` that differs on any rank, if one does."""
    place = {name: index for index, name in enumerate(names)}
    index = agree(min((place[name] for name in differing), default=len(names)))
    if index == len(names):
        return
    count = len(set(differing))
    here = f"{count} of {len(names)} weights differ on this rank" if count else "another rank's part differs"
    raise WeightMismatchError(
        f"after the weight update the rollout engine does not hold the trainer's {names[index]}: {here}; its samples "
        "would not come from the policy that is being trained",
        weight=names[index],
    )


def check_range(weights: Iterable[Piece]) -> None:
    """Raises WeightMismatchError for a weight that the cast has made infinite: float16 ends at 65504, and the comparison of
    both sides comes after the cast."""
    if infinite := nonfinite_names((piece.name, piece.tensor) for piece in weights if piece.tensor.dtype == torch.float16):
        raise WeightMismatchError(
            f"{infinite[0]} is beyond what the rollout engine's float16 can hold ({len(infinite)} weights in all): set "
            "actor_rollout_ref.rollout.dtype=bfloat16 or float32",
            weight=infinite[0],
        )


def _copy_block(transfer: Transfer, source: LocalPieces, destination: LocalPieces) -> Tensor:
    """Copies inside the process; returns the copied values, contiguous and in the destination's dtype."""
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
