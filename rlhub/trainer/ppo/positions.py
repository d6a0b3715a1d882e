"""Where in the data a prompt came from, so that a resumed run can draw from the first that has not ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from rlhub.data.prompts import PromptLoader
from rlhub.protocol import DataProto
from rlhub.rollout_service.executor.episode_groups import PromptItem


class Positions:
    """Remembers the loader's state before each batch that still has prompts in work.  One thread draws, another asks."""

    def __init__(self, loader: PromptLoader) -> None:
        self.loader = loader
        self._before: deque[tuple[int, dict[str, Any]]] = deque()
        self._lock = threading.Lock()

    def items(self, batches: Iterator[DataProto]) -> Iterator[PromptItem]:
        """The prompts of the batches, one by one."""
        while True:
            with self._lock:
                state = self.loader.state()
                batch = next(batches)
                self._before.append((int(batch.batch["ordinal"][0]), state))
            yield from prompt_items(batch)

    def state(self, first: int) -> dict[str, Any]:
        """The loader's state from which the prompt with ordinal `first` comes next, or soon."""
        with self._lock:
            states = [state for begin, state in self._before if begin <= first]
            return states[-1] if states else self.loader.state()

    def forget(self, first: int) -> None:
        """No prompt before `first` will be asked for again."""
        with self._lock:
            while len(self._before) > 1 and self._before[1][0] <= first:
                self._before.popleft()


def prompt_items(batch: DataProto) -> Iterator[PromptItem]:
    """The prompts of a batch, without padding."""
    columns = batch.batch
    rows = zip(columns["prompts"].tolist(), columns["attention_mask"].sum(1).tolist(), columns["ordinal"].tolist(), strict=True)
    for number, (ids, length, ordinal) in enumerate(rows):
        row = {name: column[number] for name, column in batch.non_tensor_batch.items()}
        yield PromptItem(prompt_ids=tuple(ids[len(ids) - length :]), ordinal=ordinal, row=row)
