"""The way of each prompt through a run of episodes: where in the data it came from, and how it ended.

LoaderPositions lets a resumed run draw from the first prompt that has not ended.  PromptLog writes prompts.jsonl, one line a
prompt, whatever was killed in between:

    {"ordinal": 17, "end": "trained", "step": 3, "reason": ""}
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhub.data.prompts import PromptLoader
from rlhub.protocol import DataProto
from rlhub.rollout_service.executor.episode_groups import PromptItem
from rlhub.rollout_service.executor.ledger import Phase
from rlhub.utils.atomic import write_bytes

FILE = "prompts.jsonl"
"""In the run folder."""


class LoaderPositions:
    """Remembers the loader's state before each batch that still has prompts in work.  One thread draws, another reads."""

    def __init__(self, loader: PromptLoader) -> None:
        self.loader = loader
        self._before: deque[tuple[int, dict[str, Any]]] = deque()
        self._lock = threading.Lock()

    def items(self, batches: Iterator[DataProto]) -> Iterator[PromptItem]:
        """Yields the prompts of the batches, one by one."""
        while True:
            with self._lock:
                state = self.loader.state()
                batch = next(batches)
                self._before.append((int(batch.batch["ordinal"][0]), state))
            yield from prompt_items(batch)

    def state(self, first: int) -> dict[str, Any]:
        """Returns the loader's state from which the prompt with ordinal `first` comes next, or soon."""
        with self._lock:
            states = [state for begin, state in self._before if begin <= first]
            return states[-1] if states else self.loader.state()

    def forget(self, first: int) -> None:
        """Drops the states that only prompts before `first` need."""
        with self._lock:
            while len(self._before) > 1 and self._before[1][0] <= first:
                self._before.popleft()


def prompt_items(batch: DataProto) -> Iterator[PromptItem]:
    """Yields the prompts of a batch, without padding."""
    columns = batch.batch
    rows = zip(columns["prompts"].tolist(), columns["attention_mask"].sum(1).tolist(), columns["ordinal"].tolist(), strict=True)
    for number, (ids, length, ordinal) in enumerate(rows):
        row = {name: column[number] for name, column in batch.non_tensor_batch.items()}
        yield PromptItem(prompt_ids=tuple(ids[len(ids) - length :]), ordinal=ordinal, row=row)


class PromptLog:
    """Appends a line when a prompt ends: trained, rejected or dropped.

    `ended` is the ledger's on_end, called on the event loop.  step: the present training step; a line names the step that trained
    its prompt, or this one where the prompt was rejected or dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 0
        self._taken: dict[int, int] = {}  # ordinal -> the step that trains it, until it has

    def start(self) -> None:
        """A run begins: lines that an earlier run left here are not its own."""
        self.path.unlink(missing_ok=True)

    def take(self, step: int, ordinals: Iterable[int]) -> None:
        """These prompts train in this step, and end with it."""
        self.step = step
        self._taken.update(dict.fromkeys(ordinals, step))

    def ended(self, ordinals: Sequence[int], phase: Phase, reason: str) -> None:
        """Appends a line for each prompt, all in one write."""
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
        """Keeps the lines of prompts that have ended as far as this ledger's state knows: the others are in work again, as the
        metrics of steps that a resumed run repeats are written again."""
        if not self.path.is_file():
            return  # the run was resumed in another folder
        next_ordinal, in_work = int(ledger["next_ordinal"]), {int(ordinal) for ordinal, _ in ledger["open"]}
        kept = [
            line
            for line in self.path.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n") and (ordinal := json.loads(line)["ordinal"]) < next_ordinal and ordinal not in in_work
        ]
        write_bytes(self.path, b"".join(kept))
