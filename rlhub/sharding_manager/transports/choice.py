"""Which transport the processes of a transfer use."""

from __future__ import annotations

from collections.abc import Sequence

from rlhub.sharding_manager.layout_exchange import Member
from rlhub.sharding_manager.links import Links
from rlhub.sharding_manager.transports.base import Transport
from rlhub.sharding_manager.transports.collective import CollectiveTransport
from rlhub.sharding_manager.transports.shared_memory import SharedMemoryTransport


def choose_transport(links: Links | None, members: Sequence[Member], memory_bytes: int) -> Transport | None:
    """The fastest that reaches all members, with buffers of at most `memory_bytes` a process; None for one process alone.

    Every process calls it.
    """
    if links is None:
        return None
    if len({member.node for member in members}) == 1 and {member.device for member in members} == {"cpu"}:
        transport = SharedMemoryTransport.create(links, memory_bytes, sends=bool(members[links.rank].sources))
        if transport is not None:
            return transport
    return CollectiveTransport(links, memory_bytes)
