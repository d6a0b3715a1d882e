"""The rule by which the number of replicas follows the queue of requests; pure, without a clock of its own.

A replica is added when the requests that wait would be served later than a new replica could serve them: the queue, at the rate
at which the present replicas complete requests, takes longer than the last replica took to start, for `hold_s` seconds on end.
The rate is (replicas * places) / s by Little's law, where s is the mean time that a request occupies its place.

A replica is removed when the others would have had places to spare: the most requests at once, waiting or running, since at
least `idle_s` seconds, ten starts and two publications of weights filled at most ROOM of the places of one replica less.  Two
publications span a whole training step, so that the pause in which the policy trains is not taken for idleness.

The two thresholds lie apart by a whole replica's places, every change begins both observations anew, there is one change at a
time, and a replica that could not be added is tried again after a time that doubles.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Action = Literal["add", "remove"]

HOLD_S, IDLE_S = 5.0, 60.0
IDLE_STARTS, IDLE_PUBLICATIONS = 10.0, 2
ROOM = 0.8
"""Largest share of the places of one replica less that the requests may have filled; the rest is for chance."""
HALF_LIFE_S = 300.0
"""Half-life of what is known of a request's duration: responses change their length during training."""
RETRY_S, RETRY_MOST_S = 10.0, 600.0


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplicaBounds:
    """The smallest and the largest number of replicas; None for no largest one.  by_queue: the number follows the queue of
    requests; else only calls change it."""

    least: int = 1
    most: int | None = None
    by_queue: bool = False


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplicaLoad:
    """The load of the service at one time.

    at: seconds of a clock.  replicas: the number that serve or will without a change.  waiting: requests for which their replica
    has no place; running: those that have one.  completed: requests since the start.  publication: number of the newest weights,
    None if none are published.
    """

    at: float
    replicas: int
    waiting: int = 0
    running: int = 0
    completed: int = 0
    publication: int | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class Decision:
    """A change of the number of replicas, and the reason for the log."""

    action: Action
    reason: str


@dataclass(slots=True, kw_only=True)
class QueueRule:
    """Decides on changes within the bounds; see the module docstring.

    places: the number of requests that a replica runs at once.  start_s: the time that the last start took.
    """

    bounds: ReplicaBounds
    places: int
    start_s: float = 0.0
    hold_s: float = HOLD_S
    idle_s: float = IDLE_S
    _busy_s: float = 0.0  # that places were occupied, and the requests that were completed meanwhile, both fading
    _done: float = 0.0
    _last: ReplicaLoad | None = None
    _queued_since: float | None = None
    _loads: deque[ReplicaLoad] = field(default_factory=deque)
    _failures: int = 0
    _retry_at: float = -math.inf

    def decide(self, load: ReplicaLoad, *, busy: bool = False) -> Decision | None:
        """Returns the change that the load calls for, or None.  It is called about once a second.

        busy: a change runs, or a replica that died starts again; nothing is decided then.
        """
        self._learn(load)
        if busy:
            return None
        if load.at >= self._retry_at and load.replicas < self.bounds.least:
            return Decision(action="add", reason=f"{load.replicas} replicas, and min_replicas={self.bounds.least}")
        return self._grow(load) or self._shrink(load)

    def changed(self, start_s: float | None = None) -> None:
        """Takes notice that the number has changed or is being changed, by whomever: observation begins anew.

        start_s: the time that a replica took to start, where one did.
        """
        self._queued_since = None
        self._loads.clear()
        if start_s is not None:
            self.start_s, self._failures = start_s, 0

    def failed(self, at: float) -> None:
        """Takes notice that a replica could not be added: the next one is, after a while."""
        self.changed()
        self._retry_at = at + min(RETRY_S * 2**self._failures, RETRY_MOST_S)
        self._failures += 1

    def queue_s(self, load: ReplicaLoad) -> float:
        """Returns the time until the last of the waiting requests gets a place, in seconds, as far as completions are known."""
        return load.waiting * self._busy_s / (max(self._done, 1.0) * max(load.replicas, 1) * self.places)

    def _learn(self, load: ReplicaLoad) -> None:
        if (last := self._last) is not None:
            passed = max(load.at - last.at, 0.0)
            fading = 0.5 ** (passed / HALF_LIFE_S)
            self._busy_s = self._busy_s * fading + last.running * passed
            self._done = self._done * fading + load.completed - last.completed
        self._last = load
        self._loads.append(load)
        while len(self._loads) > 1 and self._is_long_ago(self._loads[1], load):
            self._loads.popleft()

    def _is_long_ago(self, before: ReplicaLoad, now: ReplicaLoad) -> bool:
        """Returns whether the time since `before` is enough to call a replica idle."""
        published = now.publication is None or (
            before.publication is not None and now.publication >= before.publication + IDLE_PUBLICATIONS
        )
        return published and now.at - before.at >= max(self.idle_s, IDLE_STARTS * self.start_s)

    def _grow(self, load: ReplicaLoad) -> Decision | None:
        queue_s, most = self.queue_s(load), self.bounds.most
        if not load.waiting or queue_s <= self.start_s:
            self._queued_since = None
            return None
        since = self._queued_since = load.at if self._queued_since is None else self._queued_since
        if load.at - since < self.hold_s or load.at < self._retry_at or (most is not None and load.replicas >= most):
            return None
        waits = f"{load.waiting} requests wait for a place, the last for {queue_s:.1f} s"
        return Decision(action="add", reason=f"{waits}; a replica starts in {self.start_s:.1f} s")

    def _shrink(self, load: ReplicaLoad) -> Decision | None:
        if load.replicas <= self.bounds.least or not self._is_long_ago(self._loads[0], load):
            return None
        peak, left = max(seen.waiting + seen.running for seen in self._loads), (load.replicas - 1) * self.places
        if peak > ROOM * left:
            return None
        passed = load.at - self._loads[0].at
        return Decision(
            action="remove",
            reason=f"at most {peak} requests at once in {passed:.0f} s, and {load.replicas - 1} replicas have {left} places",
        )
