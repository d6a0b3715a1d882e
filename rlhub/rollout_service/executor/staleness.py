"""How far generation may run ahead of training, and how old a sample may be when it is trained.

Two sides of one bound.  Admission paces: so many groups (prompts with all their samples) are accepted or running at version v
that none of them needs to wait longer than the bound.  It bounds only what is started.  Consumption guarantees: what is older
than the bound when it is taken for training is dropped, masked, or trained with a correction (executor.py).

Version v of the policy is that after v training steps; at step s (from 1) a sample is (s - 1) - version of its first token
versions old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class StalenessManager:
    """Admission, in groups.  One thread at a time; knows nothing of what runs.

    batch: groups a training step takes.  max_staleness: the bound, in versions.  pipeline_depth: batches that generation may
    run ahead of training, where that is less than the bound; None: as many.  max_concurrent: most groups in work at once;
    None: as many as the bound allows.
    """

    batch: int
    max_staleness: int
    pipeline_depth: int | None = None
    max_concurrent: int | None = None
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
        """Batches that generation runs ahead."""
        return self.max_staleness if self.pipeline_depth is None else min(self.max_staleness, self.pipeline_depth)

    @property
    def concurrency(self) -> int:
        """Most groups in work at once."""
        return (self.max_staleness + 1) * self.batch if self.max_concurrent is None else self.max_concurrent

    @property
    def capacity(self) -> int:
        """Groups that may be started now; negative where more are about than the bound allows (after a resume)."""
        ahead = (self.depth + self.version + 1) * self.batch - (self.accepted + self.running)
        return min(self.concurrency - self.running, ahead)

    def on_submit(self) -> None:
        """A group was started."""
        self.running += 1

    def on_accept(self) -> None:
        """A group is finished and may be trained."""
        self.running -= 1
        self.accepted += 1

    def on_reject(self) -> None:
        """A group ended without anything to train: rejected, filtered out or failed."""
        self.running -= 1

    def on_drop(self) -> None:
        """An accepted group was found too old.  Its place is given back: training waits for another in its stead."""
        self.accepted -= 1

    def set_version(self, version: int) -> None:
        """Generation has this version from now on."""
        if version < self.version:
            raise ValueError(f"the policy's version cannot go back from {self.version} to {version}; load_state does")
        self.version = version

    def is_stale(self, first_version: int, step: int) -> bool:
        """Whether a token of that version is beyond the bound at this training step."""
        return (step - 1) - first_version > self.max_staleness

    def state(self) -> dict[str, int]:
        """JSON-able; the rest follows from the ledger."""
        return {"version": self.version}

    def load_state(self, state: Mapping[str, int], *, finished: int, running: int) -> None:
        """Count as if the run had never stopped: each of `version` steps trained a batch, `finished` groups wait to be
        trained, and `running` restored ones go on."""
        self.version = int(state["version"])
        self.accepted, self.running = self.version * self.batch + finished, running
