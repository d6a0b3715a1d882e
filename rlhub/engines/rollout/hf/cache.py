"""The key-value cache of a decoding batch: filled by reading prompts, written in place, grown rarely, and compacted when rows
finish.

Appending by concatenation would copy the whole cache at every token.  Rows of different lengths are left-padded, and a mask
hides the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from rlhub.models.vision import ImageReader, input_embeddings

SPARE_MASK_COLUMNS = 128  # the columns of a new mask beyond the cache's
GROWTH = 1.5  # the factor by which a full cache grows; each token is then copied about twice in all
R = TypeVar("R")


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


@dataclass(slots=True, frozen=True)
class Prompt:
    """The tokens of a prompt and the files of its pictures (see `pack_files`); equal ones are read once."""

    ids: tuple[int, ...]
    pictures: bytes = b""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True, kw_only=True)
class ReadPrompts:
    """What a model has read: the logits after each prompt (prompts, vocabulary), the cache that it filled, and the position of
    each next token (prompts,), which with pictures is not the number of tokens."""

    logits: Tensor
    cache: Cache
    positions: Tensor


def read_prompts(model: PreTrainedModel, prompts: Sequence[Prompt], reader: ImageReader | None = None) -> ReadPrompts:
    """Runs the model over left-padded prompts, ascending in length.  reader: of their pictures, if the model reads some."""
    width = len(prompts[-1])
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt.ids)
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    columns = torch.arange(width)
    visible = (columns[None, :] <= columns[:, None])[None] & (columns[None, None, :] >= pads[:, None, None])
    mask = torch.zeros(visible.shape, dtype=model.dtype).masked_fill_(~visible, torch.finfo(model.dtype).min)
    cache = Cache(layers=[DynamicLayer() for _ in range(len(model.get_decoder().layers))])
    positions = (columns[None, :] - pads[:, None]).clamp(min=0)
    read: dict[str, Tensor] = {"input_ids": ids.to(model.device)}
    if reader is not None:
        images = reader.plan(model, ids, columns >= pads[:, None], [prompt.pictures for prompt in prompts]).to(model.device)
        positions, read = images.position_ids, {"inputs_embeds": input_embeddings(model, ids.to(model.device), images)}
    out = model(
        **read,
        attention_mask=mask[:, None].to(model.device),
        position_ids=positions.to(model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    following = positions.view(-1, *ids.shape).amax((0, 2)) + 1
    return ReadPrompts(logits=out.logits[:, -1], cache=cache, positions=following.to(model.device))


def experts_of_rows(prompts: Sequence[Tensor], fed: Sequence[tuple[Tensor, Tensor]], lengths: Tensor) -> list[Tensor]:
    """Returns `Completion.routed_experts` of each row.  fed: after each step the rows whose tokens went through the model, of
    which some may have ended, and their experts.  lengths: (rows,) the tokens of each completion."""
    if not fed:
        return [prompt.cpu() for prompt in prompts]
    rows, experts = map(torch.cat, zip(*fed, strict=True))
    by_row = torch.split(experts[rows.argsort(stable=True)], rows.bincount(minlength=len(prompts)).tolist())
    parts = zip(prompts, by_row, lengths.tolist(), strict=True)
    return [torch.cat([prompt, own[: length - 1]]).cpu() for prompt, own, length in parts]


def key_mask(pads: Tensor, columns: int, dtype: torch.dtype) -> Tensor | None:
    """Returns the (rows, 1, 1, columns) additive mask that hides each row's padding, or None if there is no padding.

    The mask uses the lowest finite number, so that a row without any visible key stays finite.
    """
    if int(pads.max()) == 0:
        return None
    hidden = torch.arange(columns, device=pads.device)[None, :] < pads[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=pads.device).masked_fill_(hidden, torch.finfo(dtype).min)
    return mask[:, None, None]


@dataclass(slots=True, kw_only=True)
class Places(Generic[R]):
    """The rows' places in the cache, including empty ones (None).  All tensors are (places,).

    pads: the number of padding columns before the row.
    positions: the position of the next token.
    advance: 1 where there is a row, else 0.
    tokens: the token that was sampled last.
    mask: see `key_mask`.  R: what the engine knows of a row.
    """

    cache: Cache
    rows: list[R | None]
    pads: Tensor
    positions: Tensor
    advance: Tensor
    tokens: Tensor
    mask: Tensor | None

    @property
    def length(self) -> int:
        """Returns the number of filled columns of the cache."""
        length: int = self.cache.layers[0].get_seq_length()
        return length

    def taken(self) -> list[int]:
        """Returns the places that have a row."""
        return [place for place, row in enumerate(self.rows) if row is not None]

    def free(self) -> list[int]:
        """Returns the places without one."""
        return [place for place, row in enumerate(self.rows) if row is None]

    def arrange(self, sources: list[int], rows: list[R | None]) -> Tensor:
        """Copies the places `sources` into new ones, which hold `rows`, and returns `sources` as a tensor.

        Columns that are padding for every row are dropped.
        """
        index = torch.tensor(sources, device=self.pads.device)
        first_column = int(self.pads[index].min())
        keep_rows(self.cache, index, first_column)
        self.pads, self.positions = self.pads[index] - first_column, self.positions[index]
        self.advance, self.tokens = self.advance[index], self.tokens[index]
        self.rows = rows
        self.advance[[place for place, row in enumerate(rows) if row is None]] = 0
        self.remask()
        return index

    def remask(self) -> None:
        """Builds a new mask, with columns to spare."""
        self.mask = key_mask(self.pads, self.length + SPARE_MASK_COLUMNS, self.cache.layers[0].keys.dtype)

    def leave(self, place: int) -> None:
        """Empties the place of a row that has ended."""
        self.rows[place] = None
        self.advance[place] = 0
