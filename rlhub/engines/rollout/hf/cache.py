"""The key-value cache of a decoding batch: filled by reading prompts, written in place, grown rarely, and compacted when rows
finish.

Appending by concatenation would copy the whole cache at every token.  Rows of different lengths are left-padded, and a mask
hides the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

GROWTH = 1.5  # the factor by which a full cache grows; each token is then copied about twice in all


class BufferLayer(DynamicLayer):  # type: ignore[misc]  # transformers' types are not read
    """One layer's keys and values, (rows, kv heads, capacity, width), whose first `length` columns are filled."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.length = keys, values, length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values; returns views of all filled columns."""
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
        """Keeps only the given rows, and drops all columns before `first_column`."""
        columns = slice(first_column, self.length)
        capacity = self.keys.shape[2] - first_column
        length = self.length - first_column
        self.keys = _resized(self.keys[:, :, columns].index_select(0, rows), length, capacity)
        self.values = _resized(self.values[:, :, columns].index_select(0, rows), length, capacity)
        self.length = length

    def widen(self, columns: int) -> None:
        """Inserts columns of zeros before the first column."""
        self.keys, self.values = (_shifted(buffer, self.length, columns) for buffer in (self.keys, self.values))
        self.length += columns

    def get_seq_length(self) -> int:
        return self.length


def _resized(buffer: Tensor, length: int, capacity: int) -> Tensor:
    """Returns a buffer of `capacity` columns that begins with the first `length` columns of `buffer`."""
    rows, heads, _, width = buffer.shape
    out = buffer.new_empty(rows, heads, capacity, width)
    out[:, :, :length] = buffer[:, :, :length]
    return out


def _shifted(buffer: Tensor, length: int, columns: int) -> Tensor:
    """Returns a buffer of `columns` columns of zeros, followed by the first `length` columns of `buffer`."""
    rows, heads, capacity, width = buffer.shape
    out = buffer.new_empty(rows, heads, capacity + columns, width)
    out[:, :, :columns] = 0
    out[:, :, columns : columns + length] = buffer[:, :, :length]
    return out


def allocate(prefilled: Cache, rows: int, length: int, capacity: int) -> Cache:
    """Returns a cache for `rows` rows, shaped like the layers of `prefilled`; the caller fills its first `length` columns."""
    layers = []
    for layer in prefilled.layers:
        _, heads, _, width = layer.keys.shape
        keys = layer.keys.new_empty(rows, heads, capacity, width)
        values = layer.values.new_empty(rows, heads, capacity, layer.values.shape[-1])
        layers.append(BufferLayer(keys, values, length))
    return Cache(layers=layers)


def fill_rows(cache: Cache, prefilled: Cache, rows: Tensor, source: Tensor) -> None:
    """Copies the prompts `source` of `prefilled` into the rows `rows`, aligned with the right end of the filled columns."""
    for layer, prompt in zip(cache.layers, prefilled.layers, strict=True):
        width = prompt.keys.shape[2]
        columns = slice(layer.length - width, layer.length)
        layer.keys[rows, :, columns] = prompt.keys.index_select(0, source)
        layer.values[rows, :, columns] = prompt.values.index_select(0, source)
        if columns.start:  # columns of padding are masked, but must be finite
            layer.keys[rows, :, : columns.start] = 0
            layer.values[rows, :, : columns.start] = 0


def keep_rows(cache: Cache, rows: Tensor, first_column: int) -> None:
    """Compacts every layer by `BufferLayer.keep`."""
    for layer in cache.layers:
        layer.keep(rows, first_column)


def widen(cache: Cache, columns: int) -> None:
    """Inserts columns on the left of every layer by `BufferLayer.widen`."""
    for layer in cache.layers:
        layer.widen(columns)


def prefill_chunks(lengths: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """Returns the ranges of the ascending `lengths` whose padded size is at most `max_tokens`; each range has at least one
    prompt."""
    chunks, first = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or (i + 1 - first) * lengths[i] > max_tokens:
            chunks.append((first, i))
            first = i
    return chunks


def read_prompts(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Cache]:
    """Runs the model over left-padded prompts, ascending in length; returns the logits of the last position (prompts,
    vocabulary) and the filled cache."""
    width = len(prompts[-1])
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    columns = torch.arange(width)
    visible = (columns[None, :] <= columns[:, None])[None] & (columns[None, None, :] >= pads[:, None, None])
    mask = torch.zeros(visible.shape, dtype=model.dtype).masked_fill_(~visible, torch.finfo(model.dtype).min)
    cache = Cache(layers=[DynamicLayer() for _ in range(len(model.get_decoder().layers))])
    out = model(
        input_ids=ids.to(model.device),
        attention_mask=mask[:, None].to(model.device),
        position_ids=(columns[None, :] - pads[:, None]).clamp(min=0).to(model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits[:, -1], cache


def key_mask(pads: Tensor, columns: int, dtype: torch.dtype) -> Tensor | None:
    """Returns the (rows, 1, 1, columns) additive mask that hides each row's padding, or None if there is no padding.

    The mask uses the lowest finite number, so that a row without any visible key stays finite.
    """
    if int(pads.max()) == 0:
        return None
    hidden = torch.arange(columns, device=pads.device)[None, :] < pads[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=pads.device).masked_fill_(hidden, torch.finfo(dtype).min)
    return mask[:, None, None]
