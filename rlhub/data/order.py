"""The order of rows is a function of seed, epoch and cursor, so that a run can stop and resume anywhere.

Every prompt of a run has a running number, its ordinal, which seeds the noise of its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from rlhub.errors import DataError
from rlhub.protocol import DataProto
from rlhub.utils.seeding import permutation


class IndexedData(Protocol):
    """A data set as a loader reads it: rows, their batches, and a fingerprint of all rows."""

    fingerprint: str

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> DataProto: ...


class ResumableLoader:
    """Iterator over the batches of ONE epoch, from the cursor on; `epoch` is the number of epochs already complete.

        while loader.epoch < total_epochs:
            for batch in loader: ...

    While a batch is used, `state()` returns the state after that batch: a loader that loads it continues with the next batch.
    Each batch has a column `ordinal` (rows,) int64.
    """

    def __init__(
        self, dataset: IndexedData, batch_size: int, *, seed: int = 1, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        if batch_size < 1:
            raise DataError(f"the batch size must be at least 1, got {batch_size}")
        if drop_last and len(dataset) < batch_size:
            raise DataError(
                f"the data set has {len(dataset)} usable rows, fewer than one batch of {batch_size}: "
                f"set data.train_batch_size to at most {len(dataset)} or add data"
            )
        self.dataset, self.batch_size = dataset, batch_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = 0
        self._cursor = 0
        self._consumed = 0

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self.dataset) // self.batch_size if self.drop_last else -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[DataProto]:
        if self._rows_left() < self._least():
            self._end_epoch()  # resumed with a larger batch size than what was left of the epoch
        order = permutation(self.seed, self.epoch, len(self.dataset)) if self.shuffle else np.arange(len(self.dataset))
        ends = False
        while not ends:
            indices = order[self._cursor : self._cursor + self.batch_size]
            batch = self.dataset.batch(indices)
            ordinals = torch.arange(self._consumed, self._consumed + len(indices))
            batch.union(DataProto.from_dict({"ordinal": ordinals}))
            self._cursor += len(indices)
            self._consumed += len(indices)
            ends = self._rows_left() < self._least()
            if ends:
                self._end_epoch()
            yield batch

    def endless(self) -> Iterator[DataProto]:
        """Yields the batches from the cursor on, epoch after epoch."""
        while True:
            yield from self

    def _least(self) -> int:
        """Returns the fewest rows that make a batch."""
        return self.batch_size if self.drop_last else 1

    def _rows_left(self) -> int:
        return len(self.dataset) - self._cursor

    def _end_epoch(self) -> None:
        self.epoch, self._cursor = self.epoch + 1, 0

    @property
    def extras_fingerprint(self) -> str | None:
        """The fingerprint of the columns that rewards and workflows read besides prompt and ground truth; None without such
        columns."""
        return None

    def state(self) -> dict[str, Any]:
        """Returns the position as JSON-able values."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "cursor": self._cursor,
            "consumed": self._consumed,
            "dataset_hash": self.dataset.fingerprint,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`.  Raises DataError when the data or their order have changed."""
        if state["dataset_hash"] != self.dataset.fingerprint:
            raise DataError(
                "the data set is not the one the run was started with (its rows, tokenizer, prompt template or length settings "
                "changed), so the position in it has no meaning: restore it, or start anew with trainer.resume_mode=disable "
                "and another trainer.default_local_dir"
            )
        for name, now in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != now:
                raise DataError(f"data.{name} was {state[name]} when the run was started and is {now} now: set it back")
        self.epoch, self._cursor, self._consumed = int(state["epoch"]), int(state["cursor"]), int(state["consumed"])
