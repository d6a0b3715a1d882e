"""One replica of the rollout service, as the driver sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import AsyncActor

ReplicaState = Literal["fresh", "serving", "leaving", "dead"]
"""fresh: has an engine without weights; leaving: finishes its requests and gets no new ones."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PublishedWeights:
    """Weights that were published.  number: of the publication, so that publishing a version again is told apart."""

    number: int
    folder: str
    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """publication: the number of the weights it has; pins: how many views keep it at its version.

    requests, cost: what is under way there; cost is in tokens, prompts and the most that may be sampled.
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
        """A request goes there."""
        self.requests += 1
        self.cost += cost
        self.idle.clear()

    def end(self, cost: int) -> None:
        """It is over, whatever became of it."""
        self.requests -= 1
        self.cost -= cost
        if self.requests == 0:
            self.idle.set()
