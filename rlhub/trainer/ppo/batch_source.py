"""Where training batches come from: the one thing in which schedules differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlhub.checkpoint.files import FileEntry
from rlhub.protocol import DataProto


class BatchSource(Protocol):
    """Gives one training batch after the other, from prompts that it draws itself.

    metrics: of the last `sample`.  policy_version: of the newest weights, those that the next step will change.
    """

    metrics: dict[str, float]
    policy_version: int

    def start(self) -> None:
        """The actor has its weights, loaded or restored; called once, before anything else is asked."""
        ...

    def sample(self, prompts: Iterator[DataProto], step: int) -> DataProto:
        """The batch of training step `step` (from 1).  prompts: endless, the same at each call."""
        ...

    def publish(self, version: int) -> None:
        """Training has made version `version` of the policy; called once after each step, in order."""
        ...

    def save(self, folder: Path) -> list[FileEntry]:
        """Write what is too much for `state` below a checkpoint's folder."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able: the position in the prompts ("loader") and what else must be remembered."""
        ...

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go on from `state` and what `save` wrote; before `start`."""
        ...
