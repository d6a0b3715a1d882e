"""StalenessManager: how far generation may run ahead of training, and how old a sample may be when it is trained.

The bound has two sides.  Admission limits the number of groups (prompts with all their samples) that are accepted or running at
version v, so that none of them has to wait longer than the bound; it controls only what is started.  Consumption enforces the
bound: a group that is older when training takes it is dropped, masked, or trained with a correction (batches.py).

The lead of generation is how far it runs ahead in fact.  Pacing makes it as small as keeps the trainer busy, so that samples are
no older than they must be; the bound stays a bound.

Version v of the policy is that after v training steps.  At step s (from 1) the age of a sample is (s - 1) - version of its first
token, in versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

INCREASE, DECREASE, MOST = 4.0, 1 / 16, 0.5
"""Steps of Pacing in batches: upwards per share of its time that the trainer waited, and at most; downwards where groups waited
for the trainer.  The lead settles where the trainer waits for DECREASE / INCREASE = 1.6 % of its time."""


@dataclass(slots=True)
class Pacing:
    """The lead that keeps the trainer busy: additive increase by what the trainer waited, additive decrease where finished groups
    were left over for it.  It begins with one batch, below which the trainer would wait for whole groups in every step.

    batch: the number of groups per training step.  lead: in groups.
    """

    batch: int
    lead: float = 0.0

    def __post_init__(self) -> None:
        self.lead = self.lead or float(self.batch)

    def take(self, waited_share: float, num_left: int, most: int) -> None:
        """Learns from a batch that the trainer has taken.

        waited_share: the share of its time since the last one in which it waited.  num_left: finished groups after it.
        most: the largest lead that the bound on staleness allows.
        """
        self.lead += min(INCREASE * waited_share, MOST) * self.batch - min(DECREASE * self.batch, num_left)
        self.lead = max(min(self.lead, most), min(self.batch, most))


@dataclass(slots=True)
class StalenessManager:
    """Controls admission, in groups.  Only one thread may use it at a time.

    batch: the number of groups per training step.  max_staleness: the bound in versions.  pipeline_depth: the number of batches
    that generation may run ahead of training, if that is less than the bound; None for the bound.  max_concurrent: maximum number
    of groups in progress; None for as many as the bound allows.  pacing: adapts the lead within these bounds; None for a lead as
    large as they allow.
    """

    batch: int
    max_staleness: int
    pipeline_depth: int | None = None
    max_concurrent: int | None = None
    pacing: Pacing | None = None
    version: int = 0
    accepted: int = 0
    running: int = 0

    def __post_init__(self) -> None:
        limits = {"batch": (self.batch, 1), "max_staleness": (self.max_staleness, 0)}
        limits |= {"pipeline_depth": (self.depth, 0), "max_concurrent": (self.concurrency, 1)}
        for name, (value, least) in limits.items():
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @property
    def depth(self) -> int:
        """Returns the number of batches that generation may run ahead."""
        return self.max_staleness if self.pipeline_depth is None else min(self.max_staleness, self.pipeline_depth)

    @property
    def concurrency(self) -> int:
        """Returns the maximum number of groups in progress."""
        return (self.max_staleness + 1) * self.batch if self.max_concurrent is None else self.max_concurrent

    @property
    def capacity(self) -> int:
        """Returns the number of groups that may be started now; negative if there are more than the bound allows, which can
        happen after a resume."""
        ahead = self.lead + (self.version + 1) * self.batch - (self.accepted + self.running)
        return min(self.concurrency - self.running, ahead)

    @property
    def lead(self) -> int:
        """Returns the number of groups beyond the present step's by which generation may run ahead now."""
        most = self.depth * self.batch
        return most if self.pacing is None else min(round(self.pacing.lead), most)

    def on_take(self, waited_share: float, num_left: int) -> None:
        """Adapts the lead when the trainer has taken a batch; see Pacing."""
        if self.pacing is not None:
            self.pacing.take(waited_share, num_left, self.depth * self.batch)

    def on_submit(self) -> None:
        """Counts a group that starts."""
        self.running += 1

    def on_accept(self) -> None:
        """Counts a group that is finished and may be trained."""
        self.running -= 1
        self.accepted += 1

    def on_reject(self) -> None:
        """Counts a group that ended without anything to train: rejected, filtered out or failed."""
        self.running -= 1

    def on_drop(self) -> None:
        """Counts an accepted group that became too old.  Another group may start in its place."""
        self.accepted -= 1

    def on_lose(self) -> None:
        """Counts an accepted group whose samples were lost and are generated again."""
        self.accepted -= 1
        self.running += 1

    def set_version(self, version: int) -> None:
        """Sets the version that generates from now on."""
        if version < self.version:
            raise ValueError(f"the policy's version cannot go back from {self.version} to {version}; load_state does")
        self.version = version

    def is_stale(self, first_version: int, step: int) -> bool:
        """Returns whether a token of that version is beyond the bound at this training step."""
        return (step - 1) - first_version > self.max_staleness

    def state(self) -> dict[str, float]:
        """Returns the JSON-able state; the counts follow from the ledger."""
        return {"version": self.version} | ({} if self.pacing is None else {"lead": self.pacing.lead})

    def load_state(self, state: Mapping[str, float], *, finished: int, running: int) -> None:
        """Restores the counts as if the run had never stopped: each of `version` steps trained a batch, `finished` groups wait
        for training, and `running` restored groups continue."""
        self.version = int(state["version"])
        if self.pacing is not None:
            self.pacing.lead = state.get("lead", self.pacing.lead)
        self.accepted, self.running = self.version * self.batch + finished, running
