"""Rows of tokens without padding, as they are stored and moved, and with it, as workers compute on them.

A column of tokens has a row for each sample and is as wide as the longest of them, so a batch with one long response is mostly
padding.  Stored are jagged columns of the narrowest type: the tokens of prompt and response as int32, masks as bool.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhub.protocol.columns import dense_rows, jagged, take_rows

PROMPTS, RESPONSES = "prompts", "responses"
INPUT_IDS, ATTENTION_MASK = "input_ids", "attention_mask"
IMAGES = "images"
"""The column of the pictures of prompts: jagged uint8 (rows, bytes), the image files of a row by `pack_files`."""
ROUTED_EXPERTS = "routed_experts"
"""The column of the experts that the rollout engine has sent tokens to: jagged (rows, tokens, routers * top_k) of uint8, int16
for more than 256 experts.  A row has its prompt's tokens and all of its response but the last, which went through no layer."""
SIZE = struct.Struct("<I")  # of a file in front of its bytes
MASKS = ("response_mask", "learn_mask", "loss_mask", "selected")
VERSIONS = ("policy_version", "staleness")
PER_TOKEN = frozenset(
    {
        *(*MASKS, *VERSIONS),
        *("rollout_log_probs", "old_log_probs", "ref_log_prob", "sum_pi_squared", "values", "importance_weights"),
        *("token_level_scores", "token_level_rewards", "given_rewards", "added_rewards", "advantages", "returns"),
    }
)
"""The columns with one value for each token of the response, which are 0 behind it."""


def stored_names(names: Sequence[str]) -> list[str]:
    """Returns the columns to read from a store for columns that a worker reads: the padded tokens come from those without."""
    found = [PROMPTS, RESPONSES] if {INPUT_IDS, ATTENTION_MASK} & set(names) else []
    return list(dict.fromkeys([*found, *(name for name in names if name not in (INPUT_IDS, ATTENTION_MASK))]))


def without_padding(columns: Mapping[str, Tensor], lengths: Tensor | None = None) -> dict[str, Tensor]:
    """Returns the columns as they are stored.  Columns that are not of tokens stay as they are.

    columns: with `input_ids`, `attention_mask` (rows, prompt + response) and `responses` the tokens of a new batch, else further
    columns of one.  lengths: (rows,) the tokens of each response; None for a new batch.
    """
    stored = dict(columns)
    if {INPUT_IDS, ATTENTION_MASK, RESPONSES} <= columns.keys() and not columns[INPUT_IDS].is_nested:
        ids, width = stored.pop(INPUT_IDS), columns[RESPONSES].shape[1]
        attended = stored.pop(ATTENTION_MASK).bool()
        prompt = ids.shape[1] - width
        lengths = attended[:, prompt:].sum(1)
        stored[PROMPTS] = jagged(ids[:, :prompt][attended[:, :prompt]].int(), attended[:, :prompt].sum(1))
        stored[RESPONSES] = jagged(ids[:, prompt:][attended[:, prompt:]].int(), lengths)
    if lengths is None:
        return stored
    wide = [name for name in stored if name in PER_TOKEN and not stored[name].is_nested]
    return stored | {name: _cut(name, stored[name], lengths) for name in wide}


def _cut(name: str, column: Tensor, lengths: Tensor) -> Tensor:
    narrow = column.bool() if name in MASKS else column.int() if name in VERSIONS else column
    inside = torch.arange(column.shape[1]) < lengths[:, None]
    return jagged(narrow[inside], lengths)


def with_padding(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns stored columns as workers read them, padded to the longest of these rows: prompts on the left, all else on the
    right, with zeros; `input_ids` and `attention_mask` from prompts and responses.  Integers and masks are int64."""
    padded = {
        name: _pad(column) if column.is_nested and name in PER_TOKEN | {RESPONSES} else column for name, column in columns.items()
    }
    if PROMPTS in padded and RESPONSES in padded and padded[PROMPTS].is_nested:
        prompts, starts = dense_rows(padded.pop(PROMPTS))
        _, lengths = dense_rows(columns[RESPONSES])
        longest = max(int(starts.max()) if len(starts) else 0, 1)
        places = torch.arange(longest) >= longest - starts[:, None]
        left = torch.zeros(places.shape, dtype=torch.int64)
        left[places] = prompts.long()
        right = padded[RESPONSES]
        padded[INPUT_IDS] = torch.cat([left, right], 1)
        padded[ATTENTION_MASK] = torch.cat([places, torch.arange(right.shape[1]) < lengths[:, None]], 1).long()
    return padded


def _pad(column: Tensor) -> Tensor:
    values, lengths = dense_rows(column)
    longest = max(int(lengths.max()) if len(lengths) else 0, 1)
    places = torch.arange(longest) < lengths[:, None]
    whole = values if values.is_floating_point() else values.long()
    padded = torch.zeros((len(lengths), longest, *values.shape[1:]), dtype=whole.dtype)
    padded[places] = whole
    return padded


def pack_files(files: Sequence[bytes]) -> bytes:
    """Returns the bytes of a row's files one after another, each after its size."""
    return b"".join(SIZE.pack(len(file)) + file for file in files)


def unpack_files(packed: bytes) -> list[bytes]:
    """Returns the files that `pack_files` has put together."""
    found, start = [], 0
    while start < len(packed):
        start, stop = start + SIZE.size, start + SIZE.size + SIZE.unpack_from(packed, start)[0]
        found.append(packed[start:stop])
        start = stop
    return found


def images_column(rows: Sequence[bytes]) -> Tensor:
    """Returns the column IMAGES of these rows, each of packed files or empty."""
    values = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8) if any(rows) else torch.zeros(0, dtype=torch.uint8)
    return jagged(values, torch.tensor([len(row) for row in rows]))


def images_of(column: Tensor) -> list[bytes]:
    """Returns the packed files of each row of the column IMAGES."""
    values, lengths = dense_rows(column)
    return [part.numpy().tobytes() for part in torch.split(values.cpu(), lengths.tolist())]


def repeat_rows(column: Tensor, times: int) -> Tensor:
    """Returns the column with each row `times` times, copies side by side."""
    return take_rows(column, torch.arange(len(column)).repeat_interleave(times))
