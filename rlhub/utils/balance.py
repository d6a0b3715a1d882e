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


def _longest_first(values: np.ndarray, loads: np.ndarray, capacities: Sequence[int] | None) -> list[list[int]]:
    """Assigns each row, longest first, to the lightest part with free capacity."""
    parts: list[list[int]] = [[] for _ in loads]
    heap = [(load, 0, part) for part, load in enumerate(loads.tolist()) if capacities is None or capacities[part]]
    heapq.heapify(heap)
    amounts = values.tolist()
    for row in np.argsort(-values, kind="stable").tolist():
        load, count, part = heap[0]
        parts[part].append(row)
        if capacities is not None and count + 1 == capacities[part]:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + amounts[row], count + 1, part))
    return parts


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
            order = np.argsort(-self.loads, kind="stable")
            num_heavy = int(np.count_nonzero(self.loads > bound))
            num_light = int(np.count_nonzero(self.loads < bound))
            if not num_heavy or not num_light:
                return
            chosen = num_light if every else min(num_light, max(2 * num_heavy, _FEWEST_LIGHT))
            if self._exchange(order[:num_heavy], order[len(order) - chosen :]):
                every = False
            elif chosen == num_light:
                return
            else:
                every = True

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
