"""The prefixes that rows of tokens share: the forest of a pass, and cutting rows into passes so that little is computed twice.

Samples of one prompt share it, and trajectories of an episode share conversations.  Sorted by their tokens, rows stand in the
depth-first order of the trie that they form: a row shares its longest prefix with the row before it, and the rest is its own.
The passes are runs of neighbours in that order.  The cost of a run is its number of distinct tokens, so a cut between two rows
costs what they share, once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.models.prefix_attention import PrefixPlan, plan_prefix_attention


@dataclass(slots=True, kw_only=True)
class SortedRows:
    """Rows in depth-first order.

    order: the numbers of the rows.
    lengths: the tokens of each, in that order.
    shared: the tokens that each has in common with the row before it.
    """

    order: list[int]
    lengths: list[int]
    shared: list[int]

    @property
    def num_distinct(self) -> int:
        """Returns the number of distinct tokens, the nodes of the trie."""
        return sum(self.lengths) - sum(self.shared)

    def cost(self, first: int, last: int) -> int:
        """Returns the distinct tokens of the rows from number `first` up to `last`, which is left out."""
        return sum(self.lengths[first:last]) - sum(self.shared[first + 1 : last])


def sort_rows(input_ids: Tensor, needed: Tensor) -> SortedRows:
    """Sorts rows by their needed tokens.  input_ids, needed: (rows, tokens) on the CPU."""
    rows = [ids[mask] for ids, mask in zip(input_ids.numpy(), needed.numpy(), strict=True)]
    texts = [row.tobytes() for row in rows]  # any order of the tokens will do, and bytes compare fastest
    order = sorted(range(len(rows)), key=lambda row: (texts[row], row))
    before = [rows[0][:0], *(rows[row] for row in order[:-1])] if order else []
    shared = [_common(left, rows[row]) for left, row in zip(before, order, strict=True)]
    return SortedRows(order=order, lengths=[len(rows[row]) for row in order], shared=shared)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Returns the length of the longest common prefix."""
    most = min(len(left), len(right))
    differs = left[:most] != right[:most]
    return int(differs.argmax()) if differs.any() else most


@dataclass(slots=True, kw_only=True)
class Forest:
    """The trie of a pass.

    places: (tokens of all rows,) the distinct token that each token is, the rows in their own order.
    plan: the attention over the distinct tokens.
    """

    places: Tensor
    plan: PrefixPlan


def plan_forest(rows: SortedRows, device: torch.device) -> Forest:
    """Returns the forest; of rows without a token its plan has one, because other ranks wait for the model, so it must run.

    device: of the plan; the places are on the CPU.
    """
    chains: list[Tensor] = []
    chain, count = torch.empty(0, dtype=torch.int64), 0
    for length, shared in zip(rows.lengths, rows.shared, strict=True):
        chain = torch.cat([chain[:shared], torch.arange(count, count + length - shared)])
        count += length - shared
        chains.append(chain)
    own = [row for row, length in enumerate(rows.lengths) if length > rows.shared[row]]
    real = [chains[row] for row in own] or [torch.zeros(1, dtype=torch.int64)]
    plan = plan_prefix_attention(real, [rows.shared[row] for row in own] or [0], device)
    return Forest(places=torch.cat([chains[row] for row in np.argsort(rows.order)]), plan=plan)


def cut_sorted(rows: SortedRows, config: MicroBatchConfig, agree: Callable[[int], int]) -> list[list[int]]:
    """Returns the rows of each pass: at least one pass, as many as `agree` returns, and those with the most tokens first, so that
    the ranks' heavy passes meet.

    config: limits of a pass; tokens are distinct ones.
    agree: maps the fewest passes that this rank needs to the number that every rank makes; it communicates.
    """
    runs = _runs(rows, config)
    count = agree(max(len(runs), 1))
    while len(runs) < count:
        _halve(rows, runs)
    runs.sort(key=lambda run: -rows.cost(*run))
    return [sorted(rows.order[first:last]) for first, last in runs]


def _runs(rows: SortedRows, config: MicroBatchConfig) -> list[tuple[int, int]]:
    """Returns the runs that compute the fewest tokens, and of these the fewest, by dynamic programming over their ends."""
    count = len(rows.order)
    shared = np.array([0, *rows.shared[1:]])
    total = np.array([0, *accumulate(np.array(rows.lengths) - shared)])
    most_rows, most_tokens = config.rows or count, np.inf if config.max_tokens is None else config.max_tokens
    best, start = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        firsts = np.arange(max(end - most_rows, 0), end)
        fits = (total[end] - total[firsts] + shared[firsts] <= most_tokens) | (firsts == end - 1)
        found = np.where(fits, best[firsts] + shared[firsts] * (count + 1) + 1, np.inf)
        start[end], best[end] = firsts[found.argmin()], found.min()
    runs, end = [], count
    while end:
        runs.append((int(start[end]), end))
        end = int(start[end])
    return runs


def _halve(rows: SortedRows, runs: list[tuple[int, int]]) -> None:
    """Cuts the run of the most tokens where its larger part is smallest; adds an empty run where none has two rows."""
    found = max((run for run in runs if run[1] - run[0] > 1), key=lambda run: rows.cost(*run), default=None)
    if found is None:
        runs.append((0, 0))
        return
    first, last = found
    middle = min(range(first + 1, last), key=lambda cut: max(rows.cost(first, cut), rows.cost(cut, last)))
    runs[runs.index(found)] = first, middle
    runs.append((middle, last))
