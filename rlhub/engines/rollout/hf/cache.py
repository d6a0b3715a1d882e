"""Key-value cache of one decoding batch: written in place, grown rarely, and compacted when rows finish.

Appending by concatenation would copy the whole cache at every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

GROWTH = 1.5  # capacity factor when full; each token is then copied about twice in all


class BufferLayer(DynamicLayer):
    """One layer's keys and values, (rows, kv heads, capacity, width), of which the first `length` columns are filled."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.length = keys, values, length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append; returns views of everything filled."""
        stop = self.length + key_states.shape[2]
        if stop > self.keys.shape[2]:
            self._grow(stop)
        self.keys.narrow(2, self.length, key_states.shape[2]).copy_(key_states)
        self.values.narrow(2, self.length, key_states.shape[2]).copy_(value_states)
        self.length = stop
        return self.keys.narrow(2, 0, stop), self.values.narrow(2, 0, stop)

    def _grow(self, needed: int) -> None:
        capacity = max(needed, int(self.keys.shape[2] * GROWTH))
        self.keys, self.values = (_resized(buffer, self.length, capacity) for buffer in (self.keys, self.values))

    def keep(self, rows: Tensor, first_column: int) -> None:
        """Drop all rows but `rows` and all columns before `first_column`."""
        columns = slice(first_column, self.length)
        capacity = self.keys.shape[2] - first_column
        length = self.length - first_column
        self.keys = _resized(self.keys[:, :, columns].index_select(0, rows), length, capacity)
        self.values = _resized(self.values[:, :, columns].index_select(0, rows), length, capacity)
        self.length = length

    def widen(self, columns: int) -> None:
        """Insert columns of zeros before the first."""
        self.keys, self.values = (_shifted(buffer, self.length, columns) for buffer in (self.keys, self.values))
        self.length += columns

    def get_seq_length(self) -> int:
        return self.length


def _resized(buffer: Tensor, length: int, capacity: int) -> Tensor:
    """A buffer of `capacity` columns with the first `length` of `buffer`."""
    rows, heads, _, width = buffer.shape
    out = buffer.new_empty(rows, heads, capacity, width)
    out[:, :, :length] = buffer[:, :, :length]
    return out


def _shifted(buffer: Tensor, length: int, columns: int) -> Tensor:
    """A buffer with zeros in the first `columns` and then the first `length` of `buffer`."""
    rows, heads, capacity, width = buffer.shape
    out = buffer.new_empty(rows, heads, capacity + columns, width)
    out[:, :, :columns] = 0
    out[:, :, columns : columns + length] = buffer[:, :, :length]
    return out


def allocate(prefilled: Cache, rows: int, length: int, capacity: int) -> Cache:
    """An empty cache for `rows` rows, shaped like the layers of `prefilled`, whose first `length` columns are to be filled."""
    layers = []
    for layer in prefilled.layers:
        _, heads, _, width = layer.keys.shape
        keys = layer.keys.new_empty(rows, heads, capacity, width)
        values = layer.values.new_empty(rows, heads, capacity, layer.values.shape[-1])
        layers.append(BufferLayer(keys, values, length))
    cache = Cache(layers=layers)
    return cache


def fill_rows(cache: Cache, prefilled: Cache, rows: Tensor, source: Tensor) -> None:
    """Copy the prompts `source` of `prefilled` to the rows `rows`, right aligned with the cache's filled columns."""
    for layer, prompt in zip(cache.layers, prefilled.layers, strict=True):
        width = prompt.keys.shape[2]
        columns = slice(layer.length - width, layer.length)
        layer.keys[rows, :, columns] = prompt.keys.index_select(0, source)
        layer.values[rows, :, columns] = prompt.values.index_select(0, source)
        if columns.start:  # columns of padding are masked, but must be finite
            layer.keys[rows, :, : columns.start] = 0
            layer.values[rows, :, : columns.start] = 0


def keep_rows(cache: Cache, rows: Tensor, first_column: int) -> None:
    """Compact every layer; see `BufferLayer.keep`."""
    for layer in cache.layers:
        layer.keep(rows, first_column)


def widen(cache: Cache, columns: int) -> None:
    """Make room on the left in every layer; see `BufferLayer.widen`."""
    for layer in cache.layers:
        layer.widen(columns)


def new_prompt_cache(num_layers: int) -> Cache:
    """A growing cache for one forward over prompts."""
    return Cache(layers=[DynamicLayer() for _ in range(num_layers)])


def minus_infinity(dtype: torch.dtype) -> float:
    """What masks a key: the lowest finite number, so that a row without any visible key stays finite."""
    return torch.finfo(dtype).min
