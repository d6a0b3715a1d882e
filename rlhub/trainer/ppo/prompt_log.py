"""prompts.jsonl: how each prompt of the run ended, one line a prompt, whatever was killed in between.

{"ordinal": 17, "end": "trained", "step": 3, "reason": ""}

A line is written when a prompt ends (trained, rejected or dropped).  `step` is the step that trained it, or that was under way
when it was rejected or dropped.  A run that resumes first takes back the lines of prompts
that are in work again, as it does with the metrics of steps that it repeats.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhub.rollout_service.executor.ledger import Phase
from rlhub.utils.atomic import write_bytes

FILE = "prompts.jsonl"


class PromptLog:
    """`ended` is the ledger's on_end, called on the event loop.  step: the training step that is under way, set by whoever
    trains."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 0
        self._taken: dict[int, int] = {}  # ordinal -> the step that trains it, until it has

    def start(self) -> None:
        """Of a run from the beginning: what an earlier one left here is not its own."""
        self.path.unlink(missing_ok=True)

    def take(self, step: int, ordinals: Iterable[int]) -> None:
        """These prompts train in this step.  They have trained when its weights arrive, steps later where training runs ahead."""
        self.step = step
        self._taken.update(dict.fromkeys(ordinals, step))

    def ended(self, ordinals: Sequence[int], phase: Phase, reason: str) -> None:
        """Append a line for each, all in one write."""
        steps = [self._taken.pop(ordinal, self.step) for ordinal in ordinals]
        rows = [
            {"ordinal": ordinal, "end": phase.value, "step": step, "reason": reason}
            for ordinal, step in zip(ordinals, steps, strict=True)
        ]
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8"))
        finally:
            os.close(descriptor)

    def load_state(self, ledger: Mapping[str, Any]) -> None:
        """Keep the lines of prompts that have ended as far as this ledger's state knows."""
        if not self.path.is_file():
            return  # the run was resumed in another folder
        following, under_way = int(ledger["next_ordinal"]), {int(ordinal) for ordinal, _ in ledger["open"]}
        kept = [
            line
            for line in self.path.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n") and (ordinal := json.loads(line)["ordinal"]) < following and ordinal not in under_way
        ]
        write_bytes(self.path, b"".join(kept))
