"""The state of one replica of the rollout service, as the driver sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import AsyncActor

ReplicaState = Literal["fresh", "serving", "asleep", "leaving", "dead"]
"""fresh: the engine has no weights yet.  asleep: it has given its memory to the actor, and gets no requests before new weights.
leaving: it finishes its requests and gets no new ones."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PublishedWeights:
    """One publication of weights.  number: counts publications, so that a version that is published again is a new
    publication."""

    number: int
    folder: str
    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """A replica and its load.

    publication: the number of the weights that it has loaded.  pins: the number of views that keep it at its version.  requests:
    the number of running requests.  cost: their size in tokens, prompts plus the maximum that may be sampled.
    """

    name: str
    actor: AsyncActor
    state: ReplicaState = "fresh"
    version: int = -1
    publication: int = -1
    pins: int = 0
    requests: int = 0
    cost: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one weight update at a time
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    def begin(self, cost: int) -> None:
        """Counts a request that is sent to the replica."""
        self.requests += 1
        self.cost += cost
        self.idle.clear()

    def end(self, cost: int) -> None:
        """Counts the end of a request, whatever its outcome."""
        self.requests -= 1
        self.cost -= cost
        if self.requests == 0:
            self.idle.set()
