"""Tables whose parts other processes still compute, and chunks of them that fetch only their own rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from rlhub.errors import ProtocolError
from rlhub.protocol.columns import chunk_bounds
from rlhub.protocol.data_proto import DataProto


class Rows(Protocol):
    """A part of a table: rows that can be counted and cut."""

    def __len__(self) -> int: ...

    def slice(self, start: int, end: int) -> Any: ...


R = TypeVar("R", bound=Rows)


@dataclass(slots=True, eq=False)
class RowsFuture(ABC, Generic[R]):
    """References to the parts of a table, in order.

    resolve: waits for references and gives their tables, in order (Ray: `ray.get`, with a deadline).
    measure: row counts of references without fetching their columns; None: all references are resolved to count.
    cuts: `(index, num_chunks)` of the chunks taken so far, outermost first.

    It pickles (its functions must be importable), so a consumer on a worker resolves its own chunk, and fetches only the
    parts in which its rows lie.
    """

    references: list[Any]
    resolve: Callable[[list[Any]], list[R]]
    measure: Callable[[list[Any]], list[int]] | None = None
    cuts: tuple[tuple[int, int], ...] = ()

    @staticmethod
    @abstractmethod
    def join(parts: Sequence[R]) -> R:
        """Concatenates tables (at least one)."""

    def get(self) -> R:
        """Waits for the table and returns it.  Blocking."""
        if not self.cuts:
            return self.join(self.resolve(self.references))
        known = self.resolve(self.references) if self.measure is None else None
        counts = self._counts() if known is None else list(map(len, known))
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        first, last = self._row_range(starts[-1])
        # An empty chunk still needs one part, for its columns.
        hit = [index for index in range(len(counts)) if starts[index] < last and starts[index + 1] > first] or [0]
        parts = self.resolve([self.references[index] for index in hit]) if known is None else [known[index] for index in hit]
        return self.join(
            [part.slice(*_overlap(first, last, starts[index], len(part))) for part, index in zip(parts, hit, strict=True)]
        )

    def num_rows(self) -> int:
        """Returns the number of rows.  Blocking until the parts exist; fetches columns only without `measure`."""
        first, last = self._row_range(sum(self._counts()))
        return last - first

    def chunk(self, chunks: int) -> list[Self]:
        """Returns `chunks` futures of consecutive rows, sizes differing by at most one.  Does not wait."""
        if chunks < 1:
            raise ProtocolError(f"chunk: the number of parts must be at least 1, got {chunks}")
        return [type(self)(self.references, self.resolve, self.measure, (*self.cuts, (index, chunks))) for index in range(chunks)]

    @classmethod
    def concat(cls, data: Sequence[Self]) -> Self:
        """Returns one future of all their rows in order.  Does not wait."""
        if not data:
            raise ProtocolError("concat of an empty list of futures")
        first = data[0]
        if all(not part.cuts and part.resolve == first.resolve and part.measure == first.measure for part in data):
            return cls([reference for part in data for reference in part.references], first.resolve, first.measure)
        return cls(list(data), _resolve_futures, _measure_futures)

    def _counts(self) -> list[int]:
        return list(map(len, self.resolve(self.references))) if self.measure is None else self.measure(self.references)

    def _row_range(self, num_rows: int) -> tuple[int, int]:
        first, last = 0, num_rows
        for index, chunks in self.cuts:
            start, stop = chunk_bounds(last - first, chunks)[index]
            first, last = first + start, first + stop
        return first, last


def _overlap(first: int, last: int, start: int, size: int) -> tuple[int, int]:
    """Returns rows [first, last) of the table as rows of the part that begins at `start`."""
    begin = min(max(first - start, 0), size)
    return begin, max(min(last - start, size), begin)


def _resolve_futures(futures: list[RowsFuture[R]]) -> list[R]:
    return [future.get() for future in futures]


def _measure_futures(futures: list[RowsFuture[R]]) -> list[int]:
    return [future.num_rows() for future in futures]


class DataProtoFuture(RowsFuture[DataProto]):
    """The result of a non-blocking worker-group call, with `get()`, `chunk(n)` and `concat(futures)`; see RowsFuture.

    The resolver is injected, so this module knows no transport.
    """

    __slots__ = ()

    @staticmethod
    def join(parts: Sequence[DataProto]) -> DataProto:
        return DataProto.concat(parts)
