"""The order of rows is a function of a sampler's state, so that a run can stop and resume anywhere.

Every prompt of a run has a running number, its ordinal, which seeds the noise of its samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rlhub.data.samplers import Indices, Sampler, SamplerData, UniformSampler
from rlhub.errors import DataError
from rlhub.protocol import DataProto


class IndexedData(Protocol):
    """A data set as a loader reads it: rows, their batches, and a fingerprint of all rows."""

    fingerprint: str

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> DataProto: ...


class ResumableLoader:
    """Iterator over the batches of ONE epoch, from where the sampler stands; `epoch` is the number of epochs already complete.

        while loader.epoch < total_epochs:
            for batch in loader: ...

    While a batch is used, `state()` returns the state after that batch: a loader that loads it continues with the next batch.
    Each batch has a column `ordinal` (rows,) int64.  sampler: chooses the rows; None: each once an epoch, by seed and shuffle.

    remembers: whether the rows of a batch are kept until `forget`, so that what its samples score can be given to the sampler,
    and so that a resumed run draws prompts in work again, whatever the sampler has learned since.
    """

    def __init__(
        self,
        dataset: IndexedData,
        batch_size: int,
        *,
        seed: int = 1,
        shuffle: bool = True,
        drop_last: bool = True,
        sampler: Sampler | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"the batch size must be at least 1, got {batch_size}")
        if drop_last and len(dataset) < batch_size:
            raise DataError(
                f"the data set has {len(dataset)} usable rows, fewer than one batch of {batch_size}: "
                f"set data.train_batch_size to at most {len(dataset)} or add data"
            )
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        least = batch_size if drop_last else 1
        self.sampler = sampler or UniformSampler(SamplerData(num_rows=len(dataset), seed=seed, shuffle=shuffle, batch_size=least))
        self.remembers = False
        self._consumed = 0
        self._drawn: dict[int, Indices] = {}
        self._again: deque[Indices] = deque()

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self.dataset) // self.batch_size if self.drop_last else -(-len(self.dataset) // self.batch_size)

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    def __iter__(self) -> Iterator[DataProto]:
        epoch = self.epoch
        while self._again or self.epoch == epoch:
            indices = self._again.popleft() if self._again else self.sampler.next(self.batch_size)
            batch = self.dataset.batch(indices)
            ordinals = torch.arange(self._consumed, self._consumed + len(indices))
            batch.union(DataProto.from_dict({"ordinal": ordinals}))
            if self.remembers:
                self._drawn[self._consumed] = indices
            self._consumed += len(indices)
            yield batch

    def endless(self) -> Iterator[DataProto]:
        """Yields the batches from the cursor on, epoch after epoch."""
        while True:
            yield from self

    @property
    def consumed(self) -> int:
        """Returns the ordinal of the next prompt."""
        return self._consumed

    def rows_of(self, ordinals: Sequence[int]) -> list[int]:
        """Returns the row of each of these prompts, which were drawn and are not forgotten."""
        begins = sorted(self._drawn)
        found = (begins[bisect_right(begins, ordinal) - 1] for ordinal in ordinals)
        return [int(self._drawn[begin][ordinal - begin]) for begin, ordinal in zip(found, ordinals, strict=True)]

    def forget(self, first: int) -> None:
        """Drops the rows of batches that are all before the ordinal `first`."""
        for begin in [begin for begin, indices in self._drawn.items() if begin + len(indices) <= first]:
            del self._drawn[begin]

    @property
    def extras_fingerprint(self) -> str | None:
        """The fingerprint of the columns that rewards and workflows read besides prompt and ground truth; None without such
        columns."""
        return None

    def state(self, first: int | None = None) -> dict[str, Any]:
        """Returns the position as JSON-able values.  first: an ordinal that was drawn, in whose batch it then is; what was drawn
        from there on comes again.  None: all that was drawn has ended."""
        again = {} if first is None else {b: rows for b, rows in sorted(self._drawn.items()) if b + len(rows) > first}
        drawn = [indices.tolist() for indices in [*again.values(), *self._again]]
        name, own = type(self.sampler).__name__, self.sampler.state_dict()
        return {
            **(own if name == UniformSampler.__name__ else {"sampler": name, "sampler_state": own}),
            "consumed": min(again, default=self._consumed),
            "dataset_hash": self.dataset.fingerprint,
            **({"drawn": drawn} if drawn else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`.  Raises DataError when the data or their order have changed."""
        if state["dataset_hash"] != self.dataset.fingerprint:
            raise DataError(
                "the data set is not the one the run was started with (its rows, tokenizer, prompt template or length settings "
                "changed), so the position in it has no meaning: restore it, or start anew with trainer.resume_mode=disable "
                "and another trainer.default_local_dir"
            )
        was, now = state.get("sampler", UniformSampler.__name__), type(self.sampler).__name__
        if was != now:
            raise DataError(f"data.sampler was a {was} when the run was started and is a {now} now: set it back")
        self.sampler.load_state_dict(state.get("sampler_state", state))
        self._consumed, self._drawn = int(state["consumed"]), {}
        self._again = deque(np.array(indices, dtype=np.int64) for indices in state.get("drawn", ()))
