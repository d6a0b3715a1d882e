"""Splits rows by length over ranks or forward passes, so that all of them have about the same work.

The greedy rule comes first (longest processing time first: Graham 1969, SIAM J. Appl.  Math. 17(2)), then exchanges of single
rows between heavy and light parts, many parts at once.  In nearly all cases the heaviest part ends within a token of the mean, or
is as short as its longest row permits, at a hundredth of the cost of differencing (Karmarkar and Karp 1982) one row at a time.
The result is a pure function of the arguments.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from rlhub.errors import ConfigError

_EMPTY, _NONE = -1, -2
"""Entries in a table of parts and their places: a place that a row may move to, and a place that does not exist."""

_SPARE_PLACES = 2
"""Number of rows that a part may gain beyond the largest part of the greedy rule, where sizes are free."""

_FEWEST_AT_ONCE = 16
"""Number of rows below which assigning them at once costs more than one by one."""

_MOST_ROUNDS = 64
_FEWEST_LIGHT = 64
"""Maximum number of rounds of exchanges, and minimum number of light parts in a round: more than 10,000 rows in 512 parts
need."""


def partition(
    lengths: Sequence[int] | np.ndarray,
    num_parts: int,
    *,
    capacities: Sequence[int] | None = None,
    loads: Sequence[int] | np.ndarray | None = None,
) -> list[list[int]]:
    """Returns the sorted row numbers of each part, such that the sums of `lengths` are as equal as the method achieves.

    capacities: the maximum number of rows of each part; their sum is at least the number of rows (if it is equal, the sizes are
    exact).  None: sizes are free, but no part is empty if there are at least `num_parts` rows.  loads: tokens that the parts
    already have, which count too; None: none.  Raises ConfigError for invalid numbers.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if num_parts < 1:
        raise ConfigError(f"the number of parts must be at least 1, got {num_parts}")
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
        raise ConfigError("lengths must be a one-dimensional list of finite numbers that are not negative")
    if capacities is not None and sum(capacities) < len(values):
        raise ConfigError(f"{len(values)} rows do not fit into parts of {list(capacities)} rows")
    given = np.zeros(num_parts) if loads is None else np.asarray(loads, dtype=np.float64)
    parts = _longest_first(values, given, capacities)
    if num_parts == 1 or not len(values):
        return [sorted(part) for part in parts]
    table = _Table(values, parts, given, capacities)
    table.even_out()
    return table.parts()


def partition_groups(
    lengths: Sequence[int] | np.ndarray, groups: Sequence[int], capacities: Sequence[int], loads: Sequence[int] | np.ndarray
) -> list[list[int]]:
    """Returns the sorted row numbers of each part, with the rows of a group in one part where they fit.

    The heaviest group comes first and goes to the lightest part with capacity for it; where none has any, its rows fill those
    with the most capacity.  capacities: the number of rows of each part; their sum is the number of rows.  loads: tokens that the
    parts already have.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    free, amounts, parts = list(capacities), [float(load) for load in loads], [list[int]() for _ in capacities]
    for group_rows in sorted(members.values(), key=lambda rows: (-sum(lengths[row] for row in rows), rows[0])):
        rows = group_rows
        while rows:
            fitting = [part for part, places in enumerate(free) if places >= len(rows)]
            if fitting:
                part = min(fitting, key=lambda part: (amounts[part], part))
            else:
                part = max(range(len(free)), key=lambda part: (free[part], -part))
            taken, rows = rows[: free[part]], rows[free[part] :]
            parts[part] += taken
            free[part] -= len(taken)
            amounts[part] += sum(lengths[row] for row in taken)
    return [sorted(part) for part in parts]


def _longest_first(values: np.ndarray, loads: np.ndarray, capacities: Sequence[int] | None) -> list[list[int]]:
    """Assigns each row, longest first, to the lightest part with free capacity.

    As many rows at once go to the lightest parts, one each, as none of these would get a second before the last gets its first.
    """
    order = np.argsort(-values, kind="stable")
    amounts, loads, counts = values[order], loads.copy(), np.zeros(len(loads), dtype=np.int64)
    limits = np.full(len(loads), len(values)) if capacities is None else np.asarray(capacities)
    owners = np.empty(len(values), dtype=np.int64)
    done = 0
    while done < len(values):
        free = np.flatnonzero(counts < limits)
        lightest = free[np.lexsort((counts[free], loads[free]))][: len(values) - done]
        before = loads[lightest]
        after = before + amounts[done : done + len(lightest)]
        early = before[1:] < np.minimum.accumulate(after)[:-1]
        num = len(lightest) if early.all() else int(early.argmin()) + 1
        if num < _FEWEST_AT_ONCE:
            break
        owners[done : done + num], loads[lightest[:num]] = lightest[:num], after[:num]
        counts[lightest[:num]] += 1
        done += num
    owners[done:] = _one_by_one(amounts[done:].tolist(), loads.tolist(), counts.tolist(), limits.tolist())
    flat, cuts = order[np.argsort(owners, kind="stable")].tolist(), np.cumsum(np.bincount(owners, minlength=len(loads))).tolist()
    return [flat[start:stop] for start, stop in itertools.pairwise([0, *cuts])]


def _one_by_one(amounts: list[float], loads: list[float], counts: list[int], limits: list[int]) -> list[int]:
    """Returns the part of each row, in the order in which they are given; see `_longest_first`."""
    heap = [(load, counts[part], part) for part, load in enumerate(loads) if counts[part] < limits[part]]
    heapq.heapify(heap)
    owners = []
    for amount in amounts:
        load, count, part = heap[0]
        owners.append(part)
        if count + 1 == limits[part]:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + amount, count + 1, part))
    return owners


class _Table:
    """The parts as lines with equally many places.  rows: (parts, places) row numbers, _EMPTY or _NONE. amounts: their lengths, 0
    at empty places and NaN at places that do not exist.  loads: (parts,)."""

    def __init__(self, values: np.ndarray, parts: list[list[int]], loads: np.ndarray, capacities: Sequence[int] | None) -> None:
        sizes = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        places = np.arange(sizes.max() + _SPARE_PLACES)
        limits = np.full(len(parts), len(places)) if capacities is None else np.asarray(capacities)
        rows = np.where(places < limits[:, None], _EMPTY, _NONE)
        rows[places < sizes[:, None]] = np.fromiter(itertools.chain.from_iterable(parts), dtype=np.int64, count=len(values))
        self.rows = rows
        self.amounts = np.append(values, [np.nan, 0.0])[rows]
        self.loads = loads + np.nansum(self.amounts, axis=1)

    def parts(self) -> list[list[int]]:
        """Returns the sorted row numbers of each part."""
        lines = np.sort(self.rows, axis=1)  # places without a row come first
        return [line[free:] for line, free in zip(lines.tolist(), (lines < 0).sum(1).tolist(), strict=True)]

    def even_out(self) -> None:
        """Exchanges rows until no part is above the rounded-up mean, or no exchange helps."""
        bound = np.ceil(self.loads.mean())
        every = False  # all light parts take part, because the lightest alone had nothing that helps
        for _ in range(_MOST_ROUNDS):
            heavy, light = self._heaviest_first(self.loads > bound), self._heaviest_first(self.loads < bound)
            if not len(heavy) or not len(light):
                return
            chosen = len(light) if every else min(len(light), max(2 * len(heavy), _FEWEST_LIGHT))
            if self._exchange(heavy, light[len(light) - chosen :]):
                every = False
            elif chosen == len(light):
                return
            else:
                every = True

    def _heaviest_first(self, chosen: np.ndarray) -> np.ndarray:
        parts = np.flatnonzero(chosen)
        return parts[np.argsort(-self.loads[parts], kind="stable")]

    def _exchange(self, heavy: np.ndarray, light: np.ndarray) -> bool:
        """Lets each heavy part exchange the one row that evens it out best with some light part; returns False if no exchange
        helps.

        Rows a and b of parts p and q with a - load_p / 2 == b - load_q / 2 leave both parts equally loaded when exchanged, so the
        best partner of a row among all rows of all light parts is its neighbour in that order.
        """
        keys = (self.amounts[light] - self.loads[light, None] / 2).ravel()
        places = np.argsort(keys, kind="stable")[: np.count_nonzero(~np.isnan(keys))]  # NaN comes last
        keys = keys[places]
        if not len(keys):  # the light parts have neither rows nor free places
            return False
        wanted = self.amounts[heavy] - self.loads[heavy, None] / 2
        above = np.searchsorted(keys, wanted)
        below, above = np.maximum(above - 1, 0), np.minimum(above, len(keys) - 1)
        nearest = np.where(wanted - keys[below] <= keys[above] - wanted, below, above)
        line, place = np.divmod(places[nearest], self.rows.shape[1])
        partner = light[line]
        change = self.amounts[heavy] - self.amounts[partner, place]
        gap = self.loads[heavy, None] - self.loads[partner]
        helps = (change > 0) & (change < gap)
        best = np.where(helps, np.abs(change - gap / 2), np.inf).argmin(axis=1)
        taken = np.arange(len(heavy))[helps.any(axis=1)]
        best = best[taken]
        _, first = np.unique(partner[taken, best], return_index=True)  # a light part serves the heaviest that wants it
        taken, best = taken[first], best[first]
        self._swap(heavy[taken], best, partner[taken, best], place[taken, best])
        return bool(len(taken))

    def _swap(self, heavy: np.ndarray, i: np.ndarray, light: np.ndarray, j: np.ndarray) -> None:
        change = self.amounts[heavy, i] - self.amounts[light, j]
        for table in (self.rows, self.amounts):
            table[heavy, i], table[light, j] = table[light, j], table[heavy, i]
        self.loads[heavy] -= change
        self.loads[light] += change
