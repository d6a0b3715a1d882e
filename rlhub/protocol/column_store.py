"""ColumnStore, which keeps the wide columns of a process's batches for the references to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhub.errors import ColumnStoreError, ProtocolError
from rlhub.protocol.columns import dense_rows, num_bytes, take_rows
from rlhub.protocol.readonly_tensor import guard
from rlhub.protocol.sequences import RESPONSES

MOST_KEYS_NAMED = 8
"""An error names at most so many of the batches that a store has."""


class ColumnStore:
    """The wide columns of this process, by batch and name; rows are numbered by their place.

    Tensors are kept as they come and are given out read-only, for several calls read the same memory; a choice of rows is a copy.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._batches: dict[str, dict[str, Tensor]] = {}

    def put(self, key: str, columns: Mapping[str, Tensor]) -> None:
        """Adds columns to a batch, or begins it.  ProtocolError for a column that it has, or one of another length."""
        known = self._batches.get(key, {})
        if twice := known.keys() & columns.keys():
            raise ProtocolError(f"batch {key!r} has a column {min(twice)!r} on rank {self.rank}; no column is written twice")
        lengths = {name: len(column) for name, column in {**known, **columns}.items()}
        if len(set(lengths.values())) > 1:
            raise ProtocolError(f"batch {key!r} on rank {self.rank} would have columns of different lengths: {lengths}")
        self._batches[key] = known | {name: column.detach() for name, column in columns.items()}

    def take(self, key: str, names: Sequence[str], places: np.ndarray | None = None) -> dict[str, Tensor]:
        """Returns those columns of a batch: the rows at `places` in that order, or all.  Raises ColumnStoreError."""
        columns = self._find(key, names)
        chosen = {name: columns[name] for name in names}
        if not chosen:
            return {}
        num_rows = len(next(iter(chosen.values())))
        if places is None or np.array_equal(places, np.arange(num_rows)):
            return {name: column if column.is_nested else guard(column) for name, column in chosen.items()}
        if len(places) and places.max() >= num_rows:
            raise self._lack(key, f"no row {places.max()} but {num_rows} rows")
        rows = torch.from_numpy(places.astype(np.int64))
        return {name: take_rows(column, rows) for name, column in chosen.items()}

    def response_lengths(self, key: str) -> Tensor | None:
        """Returns the tokens of each response of a batch, (rows,); None for one that has no responses, or is not here."""
        column = self._batches.get(key, {}).get(RESPONSES)
        return None if column is None or not column.is_nested else dense_rows(column)[1]

    def drop(self, key: str) -> None:
        """Forgets a batch; one that is not there is no error."""
        self._batches.pop(key, None)

    def clear(self) -> None:
        """Forgets all batches."""
        self._batches.clear()

    def nbytes(self) -> int:
        """Returns the bytes of all columns."""
        return sum(num_bytes(column) for columns in list(self._batches.values()) for column in columns.values())

    def _find(self, key: str, names: Sequence[str]) -> Mapping[str, Tensor]:
        if key not in self._batches:
            listed = sorted(self._batches)
            more = f" and {len(listed) - MOST_KEYS_NAMED} more" if len(listed) > MOST_KEYS_NAMED else ""
            raise self._lack(key, f"no columns; it has {', '.join(listed[:MOST_KEYS_NAMED]) or 'no batch at all'}{more}")
        missing = [name for name in names if name not in self._batches[key]]
        if missing:
            raise self._lack(key, f"no column {missing[0]!r} but {', '.join(sorted(self._batches[key])) or 'none'}")
        return self._batches[key]

    def _lack(self, key: str, what: str) -> ColumnStoreError:
        return ColumnStoreError(
            f"rank {self.rank} has of batch {key!r} {what}. Either the batch was dropped, moved by an exchange or made by the "
            "processes of another group: call with the reference that the exchange returned. Or the process was started again "
            "after it made the columns: take the step again from its samples",
            key=key,
        )
