"""DataCoordinator: says which rows a rank gets when a batch goes from the ranks of one role to those of another.

Where every rank runs the loop, no driver deals rows.  The ranks that made a batch report how many rows they have, how long these
are, and a reference to them; the ranks that need it ask for their share, and fetch the rows themselves.  No column passes here:
only numbers of rows, and references.

Everything is kept under (step, edge), so that two batches of a step, or two steps, never meet.  A share follows from what was
reported alone, whatever came first: rows are numbered by rank and place.  Ranks that share a data-parallel rank (tensor and
pipeline parallel) ask with the same number and get the same rows.

One coordinator serves an event loop; nothing of it may be called from another thread.  It has no Ray in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from rlhub.errors import CoordinatorError, DeadlineError
from rlhub.registry import suggest
from rlhub.utils.balance import partition

Policy = Literal["even", "balanced", "groups"]
"""even: consecutive rows, numbers of rows that differ by at most one.  balanced: such numbers of rows, with about equal sums of
lengths.  groups: whole groups, with about equal sums of lengths."""
SHOWN_RANKS = 8
"""An error names at most so many ranks."""


class Key(NamedTuple):
    """A batch on its way.  step: from 1.  edge: the node that made it and the one that needs it, by any name that is used once a
    step."""

    step: int
    edge: str


@dataclass(slots=True, kw_only=True)
class ReportedRows:
    """The report of one rank on its rows.

    lengths: (rows,) tokens of each.  groups: (rows,) the group of each, the same number on every rank that has some of it; None
    where groups may be cut.  ref: how the rows are fetched; it is handed on as it is.  columns: the names of what is there.
    """

    lengths: np.ndarray
    groups: np.ndarray | None = None
    ref: Any = None
    columns: Sequence[str] = ()


@dataclass(slots=True, frozen=True, eq=False)
class RowShare:
    """The rows of one data-parallel rank, in the order of their numbers.

    rank, place: (rows,) int32, the rank that has each and its place there.  refs: those of the ranks that have some of them.
    """

    rank: np.ndarray
    place: np.ndarray
    refs: Mapping[int, Any]

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(slots=True)
class _Delivery:
    """The reports on one key.  producers: None until they are expected; whole: set when all have reported."""

    producers: tuple[int, ...] | None = None
    parts: dict[int, ReportedRows] = field(default_factory=dict)
    whole: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: bool = False
    rank: np.ndarray = field(init=False)
    place: np.ndarray = field(init=False)
    dealt: dict[tuple[int, Policy], list[np.ndarray]] = field(default_factory=dict)

    def complete(self) -> None:
        """Numbers the rows, as soon as every producer has reported."""
        if self.producers is None or len(self.parts) < len(self.producers):
            return
        sizes = [len(self.parts[rank].lengths) for rank in self.producers]
        self.rank = np.repeat(np.array(self.producers, dtype=np.int32), sizes)
        self.place = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        self.whole.set()

    def rows(self, dp_size: int, policy: Policy) -> list[np.ndarray]:
        """Returns the numbers of the rows of each data-parallel rank."""
        if (dp_size, policy) not in self.dealt:
            parts = [self.parts[rank] for rank in self.producers or ()]
            lengths = np.concatenate([part.lengths for part in parts])
            groups = [part.groups for part in parts if part.groups is not None]
            known = np.concatenate(groups) if policy == "groups" and len(groups) == len(parts) else None
            self.dealt[dp_size, policy] = deal(lengths, known, dp_size, policy)
        return self.dealt[dp_size, policy]


@dataclass(slots=True)
class DataCoordinator:
    """See the module docstring.  max_steps: so many steps may be kept at once; who forgets to drop them gets an error."""

    max_steps: int = 4
    _batches: dict[Key, _Delivery] = field(default_factory=dict)
    _last_dropped: int = 0

    def expect(self, key: Key, producers: Iterable[int]) -> None:
        """Says which ranks will report.  May be said by every rank, before or after they do; all must say the same."""
        batch, ranks = self._find(key), tuple(sorted(set(producers)))
        if not ranks:
            raise CoordinatorError(f"{_name(key)}: at least one rank must be expected to report")
        if batch.producers is not None and batch.producers != ranks:
            raise CoordinatorError(f"{_name(key)} is expected from ranks {_few(batch.producers)}, and now from {_few(ranks)}")
        if strange := sorted(set(batch.parts) - set(ranks)):
            raise CoordinatorError(f"{_name(key)}: ranks {_few(strange)} have reported, and only {_few(ranks)} are expected to")
        if batch.producers is None:
            batch.producers = ranks
            batch.complete()

    def put(self, key: Key, parts: Mapping[int, ReportedRows]) -> None:
        """Reports the rows of one rank, or of all ranks of a node.

        Raises CoordinatorError for a rank that has reported or is not expected to.
        """
        batch = self._find(key)
        for rank, part in parts.items():
            if rank in batch.parts:
                raise CoordinatorError(f"{_name(key)}: rank {rank} reports twice; two batches of a step need edges of their own")
            if batch.producers is not None and rank not in batch.producers:
                raise CoordinatorError(f"{_name(key)}: rank {rank} reports, and only {_few(batch.producers)} are expected to")
            if part.lengths.ndim != 1 or (part.groups is not None and part.groups.shape != part.lengths.shape):
                raise CoordinatorError(f"{_name(key)}: rank {rank} must report one length a row, and one group a row or none")
        batch.parts.update(parts)
        batch.complete()

    async def take(
        self,
        key: Key,
        dp_rank: int,
        dp_size: int,
        *,
        policy: Policy = "even",
        columns: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> RowShare:
        """Returns the share of a data-parallel rank as soon as all producers have reported; the same at every call.

        columns: what it will fetch.  Raises CoordinatorError where a part lacks one or the batch is dropped, and DeadlineError,
        which names the ranks that are missing.
        """
        if not 0 <= dp_rank < dp_size:
            raise CoordinatorError(f"{_name(key)}: data-parallel rank {dp_rank} of {dp_size} takes; ranks count from 0")
        batch = self._find(key)
        if not batch.whole.is_set():
            await self._wait(key, batch, timeout_s)
        if batch.dropped:
            raise CoordinatorError(f"{_name(key)} was dropped while data-parallel rank {dp_rank} waited for it")
        rows = batch.rows(dp_size, policy)[dp_rank]
        ranks = batch.rank[rows]
        refs = {}
        for rank in np.unique(ranks).tolist():
            part = batch.parts[rank]
            if missing := [name for name in columns if name not in part.columns]:
                raise CoordinatorError(
                    f"{_name(key)}: rank {rank} has no column {missing[0]!r}{suggest(missing[0], part.columns)}; it reported: "
                    f"{', '.join(part.columns) or 'none'}"
                )
            refs[rank] = part.ref
        return RowShare(ranks, batch.place[rows], refs)

    def drop(self, step: int) -> None:
        """Forgets a step and those before it.  Who still waits for them gets an error."""
        self._last_dropped = max(self._last_dropped, step)
        for key in [key for key in self._batches if key.step <= self._last_dropped]:
            batch = self._batches.pop(key)
            batch.dropped = True
            batch.whole.set()

    @property
    def num_batches(self) -> int:
        """Returns the number of batches that are kept."""
        return len(self._batches)

    async def _wait(self, key: Key, batch: _Delivery, timeout_s: float | None) -> None:
        try:
            await asyncio.wait_for(batch.whole.wait(), timeout_s)
        except TimeoutError as error:
            expected = batch.producers
            missing = "nobody has said which ranks report" if expected is None else f"missing: ranks {_few(_absent(batch))}"
            raise DeadlineError(f"take of {_name(key)}", timeout_s or 0.0, missing) from error

    def _find(self, key: Key) -> _Delivery:
        if key in self._batches:
            return self._batches[key]
        if key.step <= self._last_dropped:
            raise CoordinatorError(f"{_name(key)} comes too late: step {self._last_dropped} was dropped")
        steps = {other.step for other in self._batches} | {key.step}
        if len(steps) > self.max_steps:
            raise CoordinatorError(
                f"{_name(key)} would make {len(steps)} steps that are kept, of at most {self.max_steps}: a step is dropped when "
                f"it is over; kept are {', '.join(map(str, sorted(steps)))}"
            )
        return self._batches.setdefault(key, _Delivery())


def deal(lengths: np.ndarray, groups: np.ndarray | None, dp_size: int, policy: Policy) -> list[np.ndarray]:
    """Returns the sorted numbers of the rows of each data-parallel rank.

    lengths: (rows,).  groups: (rows,), for the policy groups alone.  Raises CoordinatorError where that has none.
    """
    base, more = divmod(len(lengths), dp_size)
    sizes = [base + (part < more) for part in range(dp_size)]
    if policy == "even":
        return np.split(np.arange(len(lengths)), np.cumsum(sizes)[:-1])
    if policy == "balanced":
        return [np.array(rows, dtype=np.int64) for rows in partition(lengths, dp_size, capacities=sizes)]
    if groups is None:
        raise CoordinatorError("policy 'groups' needs the group of every row, and not all ranks have reported it")
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))  # groups count in the order in which they first come
    group = order[group]
    sums = np.bincount(group, weights=lengths, minlength=len(first))
    owner = np.empty(len(first), dtype=np.int64)
    for part, members in enumerate(partition(sums, dp_size)):
        owner[members] = part
    owners = owner[group]
    rows = np.argsort(owners, kind="stable")
    return np.split(rows, np.searchsorted(owners[rows], np.arange(1, dp_size)))


def _absent(batch: _Delivery) -> list[int]:
    return [rank for rank in batch.producers or () if rank not in batch.parts]


def _name(key: Key) -> str:
    return f"batch {key.edge!r} of step {key.step}"


def _few(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return ", ".join(map(str, ranks[:SHOWN_RANKS])) + more
