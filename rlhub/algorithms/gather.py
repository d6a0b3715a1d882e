"""`Gather`: how the work on some rows of a training batch reads statistics of the whole batch.

Each process computes numbers of its own rows (statistics.py), a gather brings those of all rows together in sampled order, and
every process adds them in that order.  So what depends on the whole batch is the same in every bit however the rows are cut.
Rows are known by their column `sample_index`, the number of each sample as it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Collect = Callable[[Tensor], Tensor]
"""Returns the rows of every process one after the other, given this one's: (own, ...) -> (all, ...).  Of tensors of tokens the
narrower ones are padded with zeros on the right.  Every process calls it."""


@dataclass(slots=True, frozen=True, eq=False)
class Gather:
    """Brings numbers of each row together; every process that has rows of the batch calls it, in the same order.

    order: (all,) int64, the places of the samples among the collected rows, in sampled order; None where rows are so already.
    places: (own,) int64, the place of each own row in sampled order; None where `order` is.
    collect: None in a process that has all rows.
    """

    order: Tensor | None = None
    places: Tensor | None = None
    collect: Collect | None = None

    @classmethod
    def of(cls, sample_index: Tensor, collect: Collect | None = None) -> Gather:
        """Returns the gather of a batch of which this process has the rows `sample_index`, (own,) int64."""
        every = sample_index if collect is None else collect(sample_index)
        order = every.argsort()
        return cls(order, torch.searchsorted(every[order], sample_index), collect)

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the numbers of all rows in sampled order, (all, ...).  rows: (own,) or (own, numbers)."""
        every = rows if self.collect is None else self.collect(rows)
        return every if self.order is None else every[self.order]

    def each(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what a call with each of these columns does, in one exchange.  columns: float64 or int64."""
        if self.collect is None:
            return {name: self(column) for name, column in columns.items()}
        wide = [column if column.dim() > 1 else column[:, None] for column in columns.values()]
        every = self(torch.cat([column.contiguous().view(torch.int64) for column in wide], 1))
        parts = torch.split(every, [column.shape[1] for column in wide], 1)
        return {
            name: part.contiguous().view(column.dtype).reshape(-1, *column.shape[1:])
            for (name, column), part in zip(columns.items(), parts, strict=True)
        }

    def own(self, rows: Tensor) -> Tensor:
        """Returns this process's rows of numbers of all rows in sampled order: (all, ...) -> (own, ...)."""
        return rows if self.places is None else rows[self.places]


HERE = Gather()
"""The gather of a process that has the whole batch in sampled order."""
