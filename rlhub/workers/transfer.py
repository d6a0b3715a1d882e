"""Where the ranks of the actor and of a rollout on its own pool meet to move weights."""

from __future__ import annotations

from dataclasses import dataclass

from rlhub.utils.ports import free_port


@dataclass(slots=True, kw_only=True, frozen=True)
class Meeting:
    """address, port: of the rendezvous, which the actor's rank 0 serves.  Ranks of the joint group: the senders first, then
    the receivers, each in the order of their own group."""

    address: str
    port: int
    num_senders: int
    num_receivers: int

    @property
    def size(self) -> int:
        return self.num_senders + self.num_receivers


def open_meeting(address: str, num_senders: int, num_receivers: int) -> Meeting:
    """A meeting at this machine's `address`, on a port that was free a moment ago."""
    return Meeting(address=address, port=free_port(), num_senders=num_senders, num_receivers=num_receivers)
