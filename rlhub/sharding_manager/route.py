"""From everyone's description of what they hold to this process's part of a plan, ready to run again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhub.sharding_manager.execution import Execution, rank_plan
from rlhub.sharding_manager.layout_exchange import Member, check_devices, nodes_of
from rlhub.sharding_manager.links import Links
from rlhub.sharding_manager.plan import make_plan
from rlhub.sharding_manager.report import SyncReport
from rlhub.sharding_manager.schedule import schedule
from rlhub.sharding_manager.transports.collective import CollectiveTransport

BUFFER_BUCKETS = 2  # what a process may hold of messages while a planned update runs, in buckets


@dataclass(slots=True, kw_only=True)
class Route:
    """names: of all weights, in an order that all ranks share.  agree: the smallest of all ranks' numbers.  bytes: of the full
    weights as the engine holds them; wire_bytes: what this rank receives from others."""

    execution: Execution
    names: list[str]
    agree: Callable[[int], int]
    bytes: int
    wire_bytes: int

    def report(self, version: int, fingerprint: str) -> SyncReport:
        return SyncReport(
            seconds=0.0,
            bytes=self.bytes,
            num_weights=len(self.names),
            version=version,
            fingerprint=fingerprint,
            wire_bytes=self.wire_bytes,
        )


def make_route(links: Links | None, members: Sequence[Member], *, memory_bytes: int, check: bool) -> Route:
    """Every process of the links calls it with the same members, itself among them.

    memory_bytes: of this process's buffers.  Raises ReshardError where the layouts do not fit together.
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
    transport = CollectiveTransport(links, memory_bytes) if links else None
    rank = links.rank if links else 0
    destination = destinations.index(rank) if rank in destinations else None
    mine = rank_plan(
        plan,
        schedule(plan, transport.round_bytes) if transport else [],
        source=sources.index(rank) if rank in sources else None,
        destination=destination,
        source_peers=sources,
        destination_peers=destinations,
        device=members[rank].device,
    )
    full = {info.name: info for member in members for info in member.destinations}
    return Route(
        execution=Execution(mine, transport, links, check=check),
        names=sorted(full),
        agree=links.minimum if links else lambda number: number,
        bytes=sum(torch.Size(info.shape).numel() * info.dtype.itemsize for info in full.values()),
        wire_bytes=0 if destination is None else plan.received_bytes[destination],
    )
