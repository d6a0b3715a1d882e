"""Split a batch by load: which rows go to which rank, or into which micro-batch, so that all have about the same work.

Largest differencing method (Karmarkar and Karp, 1982) for k parts; with equal counts, its balanced form (Yakir, 1996), in
which every initial partition holds one item per part, so that merging keeps the counts equal.  Deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rlhub.errors import ConfigError


def sequence_cost(num_tokens: Sequence[int] | np.ndarray, hidden_size: int = 4096) -> np.ndarray:
    """Relative forward cost of sequences of these lengths, (rows,) float64: n * (12 h + n).

    A transformer layer of width h costs about 24 h^2 n multiply-adds in its matrices and 2 h n^2 in causal attention
    (Narayanan et al., arXiv:2104.04473, appendix); divided by 2 h.
    """
    lengths = np.asarray(num_tokens, dtype=np.float64)
    return lengths * (12.0 * hidden_size + lengths)


def partition(costs: Sequence[float] | np.ndarray, num_parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Row numbers of each of `num_parts` parts, sorted, with sums of `costs` as equal as the method gets them.

    equal_counts: sizes differ by at most 1, larger parts first (the sizes of `DataProto.chunk`).  Otherwise sizes are free,
    but no part is empty when there are at least `num_parts` rows.  Raises ConfigError for bad numbers.
    """
    values = np.asarray(costs, dtype=np.float64)
    if num_parts < 1:
        raise ConfigError(f"the number of parts must be at least 1, got {num_parts}")
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
        raise ConfigError("costs must be a one-dimensional list of finite numbers that are not negative")
    parts = _equal_parts(values, num_parts) if equal_counts else _free_parts(values, num_parts)
    return [sorted(part) for part in parts]


def balanced_order(costs: Sequence[float] | np.ndarray, num_parts: int) -> np.ndarray:
    """(rows,) int64: the order in which rows must stand for `chunk(num_parts)` to give parts of equal load."""
    parts = partition(costs, num_parts, equal_counts=True)
    return np.asarray([row for part in parts for row in part], dtype=np.int64)


_DIFFERENCING_LIMIT = 1 << 16
"""Rows times parts up to which differencing runs (about 0.1 s); above, with many rows per part, the greedy rule is within
a thousandth of even and costs far less."""

_SWAPS_PER_PART = 8

_State = tuple[np.ndarray, list[list[int]]]
"""A partial partition: sums of its parts in falling order, and the rows of each."""


def _difference(states: list[_State]) -> list[list[int]]:
    """Merge the two states with the largest spread, largest part of one with smallest of the other, until one is left."""
    heap = [(-(sums[0] - sums[-1]), i, (sums, parts)) for i, (sums, parts) in enumerate(states)]
    heapq.heapify(heap)
    counter = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        sums = first[0] + second[0][::-1]
        parts = [left + right for left, right in zip(first[1], reversed(second[1]), strict=True)]
        order = np.argsort(-sums, kind="stable")
        sums = sums[order]
        heapq.heappush(heap, (-(sums[0] - sums[-1]), counter, (sums, [parts[i] for i in order])))
        counter += 1
    return heap[0][2][1]


def _free_parts(values: np.ndarray, num_parts: int) -> list[list[int]]:
    if len(values) <= num_parts:
        return [[row] for row in range(len(values))] + [[] for _ in range(num_parts - len(values))]
    greedy = _fill_empty(_largest_first(values, num_parts), values)
    if len(values) * num_parts > _DIFFERENCING_LIMIT:
        return greedy
    states: list[_State] = []
    for row, value in enumerate(values):
        sums = np.zeros(num_parts)
        sums[0] = value
        states.append((sums, [[row], *([] for _ in range(num_parts - 1))]))
    differenced = _fill_empty(_difference(states), values)
    return min(differenced, greedy, key=lambda candidate: max(values[part].sum() for part in candidate))


def _largest_first(values: np.ndarray, num_parts: int) -> list[list[int]]:
    """Graham's rule, the other good heuristic: each row, largest first, to the lightest part."""
    heap: list[tuple[float, int, int]] = [(0.0, 0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in np.argsort(-values, kind="stable"):
        load, count, part = heapq.heappop(heap)
        parts[part].append(int(row))
        heapq.heappush(heap, (load + float(values[row]), count + 1, part))
    return parts


def _fill_empty(parts: list[list[int]], values: np.ndarray) -> list[list[int]]:
    """Rows of no cost may leave parts empty: give these one row of a part with several."""
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            donor.sort(key=lambda row: float(values[row]))
            part.append(donor.pop(0))
    return parts


def _equal_parts(values: np.ndarray, num_parts: int) -> list[list[int]]:
    """Rows by falling cost in groups of `num_parts`, the last filled up with rows of no cost that do not exist."""
    if not len(values):
        return [[] for _ in range(num_parts)]
    order = np.argsort(-values, kind="stable")
    states: list[_State] = []
    for start in range(0, len(order), num_parts):
        rows = order[start : start + num_parts]
        sums = np.zeros(num_parts)
        sums[: len(rows)] = values[rows]
        states.append((sums, [[int(row)] for row in rows] + [[] for _ in range(num_parts - len(rows))]))
    parts = _difference(states)
    _swap(parts, values)
    return sorted(parts, key=len, reverse=True)


def _swap(parts: list[list[int]], values: np.ndarray) -> None:
    """Even out the heaviest part with the lightest by exchanging one row each, as long as that helps (in place).

    The balanced method alone leaves what the few longest rows make: their groups' spreads exceed what later groups can mend.
    """
    sums = np.asarray([values[part].sum() for part in parts])
    for _ in range(_SWAPS_PER_PART * len(parts)):
        heavy, light = int(sums.argmax()), int(sums.argmin())
        gap = sums[heavy] - sums[light]
        if not parts[light] or gap <= 0:
            return
        change = values[parts[heavy]][:, None] - values[parts[light]][None, :]
        i, j = np.unravel_index(int(np.abs(change - gap / 2).argmin()), change.shape)
        if not 0 < change[i, j] < gap * (1 - 1e-9):
            return
        parts[heavy][i], parts[light][j] = parts[light][j], parts[heavy][i]
        sums[heavy] -= change[i, j]
        sums[light] += change[i, j]
