"""Cutting a rank's rows into forward passes: by number of rows or by a token budget, with the same number of passes on every
rank.

Sharded models communicate in every pass, so all ranks must make the same number of them; a rank that runs out of rows makes
passes over a row of padding.  With a token budget the passes become equally full once their number is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.engines.training.base import Rows
from rlhub.errors import EngineError
from rlhub.models.device_copies import to_device
from rlhub.protocol import columns
from rlhub.utils.balance import partition


@dataclass(slots=True, kw_only=True, frozen=True)
class MicroBatchConfig:
    """The limits of one pass; without either, all rows are one pass.

    rows: the most rows in a pass.
    max_tokens: the most tokens in a pass; a longer row is a pass of its own.
    share_prefixes: True computes and counts tokens of prefixes that rows of a pass share once, and cuts rows accordingly.
    """

    rows: int | None = None
    max_tokens: int | None = None
    share_prefixes: bool = False


def cut_rows(rows: Rows, config: MicroBatchConfig, rows_per_unit: int, agree: Callable[[int], int]) -> list[list[int]]:
    """Returns the row indices of each pass: at least one pass, and as many as `agree` returns.  With a token budget the passes
    are equally full.

    agree: maps the fewest passes that this rank needs to the number that every rank makes; it communicates.
    """
    lengths = rows["attention_mask"].sum(1).tolist()
    if len(lengths) % rows_per_unit:
        raise EngineError(f"{len(lengths)} rows are no whole number of units of {rows_per_unit} rows")
    bins = cut_units(lengths, config, rows_per_unit)
    count = agree(max(len(bins), 1))
    bins = even_cut(extend_cut(bins, count), lengths, config, rows_per_unit)
    return [rows_of(units, rows_per_unit) for units in bins]


def cut(lengths: Sequence[int], config: MicroBatchConfig) -> list[list[int]]:
    """Returns the row indices of each pass, by the rows' token counts.  No rows make no passes."""
    if config.max_tokens is not None:
        return _cut_by_tokens(lengths, config.max_tokens, config.rows)
    step = config.rows or max(len(lengths), 1)
    return [list(range(first, min(first + step, len(lengths)))) for first in range(0, len(lengths), step)]


def cut_units(lengths: Sequence[int], config: MicroBatchConfig, rows_per_unit: int) -> list[list[int]]:
    """Cuts as `cut` does, with every `rows_per_unit` neighbouring rows as one unit; returns indices of units."""
    return cut(*_in_units(lengths, config, rows_per_unit))


def _in_units(lengths: Sequence[int], config: MicroBatchConfig, rows_per_unit: int) -> tuple[Sequence[int], MicroBatchConfig]:
    if rows_per_unit == 1:
        return lengths, config
    totals = [sum(lengths[first : first + rows_per_unit]) for first in range(0, len(lengths), rows_per_unit)]
    most = None if config.rows is None else max(config.rows // rows_per_unit, 1)
    return totals, MicroBatchConfig(rows=most, max_tokens=config.max_tokens)


def rows_of(units: Sequence[int], rows_per_unit: int) -> list[int]:
    """Returns the indices of these units' rows, in order."""
    return [unit * rows_per_unit + row for unit in units for row in range(rows_per_unit)]


def _cut_by_tokens(lengths: Sequence[int], max_tokens: int, max_rows: int | None) -> list[list[int]]:
    """Cuts by first-fit decreasing, which needs at most 11/9 of the fewest passes plus one."""
    bins: list[list[int]] = []
    free: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for index, num_free in enumerate(free):
            if lengths[row] <= num_free and (max_rows is None or len(bins[index]) < max_rows):
                bins[index].append(row)
                free[index] -= lengths[row]
                break
        else:
            bins.append([row])
            free.append(max_tokens - lengths[row])
    return [sorted(rows) for rows in bins]


def extend_cut(bins: list[list[int]], count: int) -> list[list[int]]:
    """Returns `count` passes made from at most as many: the fullest are halved first, and further ones have no rows."""
    bins = [list(rows) for rows in bins]
    while len(bins) < count:
        largest = max(range(len(bins)), key=lambda i: len(bins[i]), default=None)
        if largest is None or len(bins[largest]) < 2:
            bins.append([])
            continue
        rows = bins[largest]
        bins[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return bins


def even_cut(bins: list[list[int]], lengths: Sequence[int], config: MicroBatchConfig, rows_per_unit: int = 1) -> list[list[int]]:
    """Returns as many passes as `bins` over the same units, with about as many tokens in each.  Returns `bins` without a token
    budget, or if an even cut would exceed it.

    Passes that are filled one after the other leave the last one nearly empty.  Ranks wait for each other in every pass, so
    they would wait for another rank's fullest pass.
    """
    totals, limits = _in_units(lengths, config, rows_per_unit)
    if limits.max_tokens is None or not totals:
        return bins
    capacities = None if limits.rows is None else [limits.rows] * len(bins)
    even = partition(totals, len(bins), capacities=capacities)
    if all(len(units) < 2 or sum(totals[unit] for unit in units) <= limits.max_tokens for units in even):
        return even
    return bins


def take_rows(rows: Rows, indices: list[int], fillers: int = 1) -> dict[str, Tensor]:
    """Returns the rows of one pass, on their device; without indices, `fillers` rows of zeros, which are masked everywhere."""
    if not indices:
        return {name: _empty(column, fillers) for name, column in rows.items()}
    count = next(iter(rows.values())).shape[0]
    if indices == list(range(count)):
        return dict(rows.items())
    index = torch.tensor(indices)
    return {name: columns.take_rows(column, index) for name, column in rows.items()}


def _empty(column: Tensor, count: int) -> Tensor:
    """Returns so many rows of zeros, without elements in a jagged column."""
    if column.is_nested:
        return columns.jagged(column.values()[:0], torch.zeros(count, dtype=torch.int64))
    return column.new_zeros((count, *column.shape[1:]))


def trim(rows: Rows) -> dict[str, Tensor]:
    """Returns the rows of one pass as views, without the columns to the left of every prompt and to the right of every response.

    One column of the prompt and one of the response remain where no row has a token.  So a pass depends on its own rows only, and
    not on the width to which the rank's or the whole batch's rows were padded.
    """
    width, longest = response_width(rows), rows["attention_mask"].shape[1]
    attended = rows["attention_mask"].any(0).nonzero().squeeze(1)
    prompt = longest - width
    first, last = (int(attended[0]), int(attended[-1])) if len(attended) else (longest, 0)
    left, right = min(first, max(prompt - 1, 0)), max(last, prompt) + 1

    def cut(column: Tensor) -> Tensor:
        if column.is_nested or column.dim() not in (2, 3) or column.shape[1] not in (longest, width):
            return column
        return column[:, left:right] if column.shape[1] == longest else column[:, : right - prompt]

    return {name: cut(column) for name, column in rows.items()}


def response_width(rows: Rows) -> int:
    """Returns the number of columns of the response, which are the last ones of `input_ids`; all of them for a reward model."""
    for name in ("response_mask", "responses"):
        if name in rows:
            return int(rows[name].shape[1])
    return int(rows["attention_mask"].shape[1])


def put_rows(target: Tensor, indices: list[int], values: Tensor) -> None:
    """Writes the results of one pass, (rows, trimmed response) or (rows,), into those rows of all results; behind the trimmed
    columns they stay as they are."""
    where = target if values.dim() == 1 else target[:, : values.shape[1]]
    where[indices] = values.to(target.device)


def on_device(rows: Rows, device: torch.device) -> dict[str, Tensor]:
    """Returns the same rows on the device, without waiting for the copies; jagged columns, which no loss reads, stay."""
    return {name: column if column.is_nested else to_device(column, device) for name, column in rows.items()}
