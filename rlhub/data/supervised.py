"""The data of supervised training: demonstrations (SFTDataset) and preference pairs (PreferenceDataset), tokenized.

A demonstration is a prompt with a response, or a conversation, with a mask over the tokens that are learned.  A preference pair
is a prompt with a chosen and a rejected answer, which both follow the same prompt tokens, as the losses assume.

Batches have the shape of rollouts (prompts left padded, responses right padded), so that one engine trains on both.  Prompts are
tokenized exactly as for generation, and answers as they follow them, so that a model learns the tokens it will sample.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from rlhub.config.sections.preference import PreferenceDataConfig
from rlhub.config.sections.sft import SFTDataConfig
from rlhub.data.files import DataRow, load_rows
from rlhub.data.images import ImagePrompts, check_whole
from rlhub.data.prompts import fingerprint_of
from rlhub.data.tokenizing import (
    Tokenizer,
    check_policy,
    check_vocabulary,
    checked_messages,
    checked_text,
    encode,
    encode_prompts,
    end_of_answer,
    ended,
    left_padded,
    pad_id,
    render_chat,
    right_padded,
    truncate,
)
from rlhub.errors import DataError
from rlhub.protocol import DataProto
from rlhub.protocol.sequences import IMAGES, images_column

logger = logging.getLogger(__name__)


MESSAGES = "messages"
"""Column with whole conversations."""
TOOLS = "tools"
"""Column with the tools of a conversation: a list of JSON schemas, which the chat template describes to the model."""


@dataclass(slots=True, kw_only=True)
class Demonstration:
    """Token ids, for each token 1 if it is learned, else 0, and the prompt's pictures by `pack_files`."""

    tokens: list[int]
    learned: list[int]
    images: bytes = b""

    def start(self) -> int:
        """Returns the index of the response's first token: the first learned one, but never 0, since nothing predicts token 0."""
        return max(1, self.learned.index(1))


class SFTDataset:
    """All demonstrations of the files, tokenized.

    A row has `config.prompt_key` (text or chat messages) and `config.response_key` (text), or `messages` with at least one
    assistant turn (and `tools`, if it uses some).  The tokens of the response or of the assistant's turns are learned, the
    end-of-sequence token included.  Rows longer than `config.max_length` tokens are an error or cut by `config.truncation`.
    Raises DataError, which names file, row and column.  vocab_size, reader: see PromptDataset.
    """

    def __init__(
        self,
        config: SFTDataConfig,
        files: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        reader: ImagePrompts | None = None,
    ) -> None:
        check_policy(config.truncation)
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token, so a model could not learn to stop")
        rows = load_rows(files)
        self.pad_id = pad_id(tokenizer)
        column = config.prompt_key
        if config.prompt_key not in rows[0].values and MESSAGES in rows[0].values:
            column, found = MESSAGES, [_of_messages(tokenizer, row) for row in rows]
            _refuse_pictures(rows, config.prompt_key)
        else:
            found = _of_pairs(config, tokenizer, rows, reader)
        check_vocabulary(rows, column, [item.tokens for item in found], vocab_size)
        self.demonstrations = [_cut(config, row, demonstration) for row, demonstration in zip(rows, found, strict=True)]
        self.has_images = any(item.images for item in self.demonstrations)
        images = [item.images for item in self.demonstrations if self.has_images]
        self.fingerprint = fingerprint_of(
            [(item.tokens, item.learned) for item in self.demonstrations], *([images] if images else [])
        )

    def __len__(self) -> int:
        return len(self.demonstrations)

    def batch(self, indices: np.ndarray) -> DataProto:
        """Returns those rows, int64: `prompts` (rows, P) left padded, `responses` and `response_mask` (rows, T) right padded,
        `input_ids` and `attention_mask` (rows, P + T)."""
        items = [self.demonstrations[index] for index in indices]
        starts = [item.start() for item in items]
        pairs = list(zip(items, starts, strict=True))
        prompts = left_padded([item.tokens[:start] for item, start in pairs], self.pad_id)
        responses = right_padded([item.tokens[start:] for item, start in pairs], self.pad_id)
        prompt_mask = left_padded([[1] * start for start in starts], 0)
        filled = right_padded([[1] * (len(item.tokens) - start) for item, start in pairs], 0)
        columns = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": right_padded([item.learned[start:] for item, start in pairs], 0),
            "input_ids": np.concatenate([prompts, responses], axis=1),
            "attention_mask": np.concatenate([prompt_mask, filled], axis=1),
        }
        tensors = {key: torch.from_numpy(column) for key, column in columns.items()}
        return DataProto.from_dict(
            tensors | ({IMAGES: images_column([item.images for item in items])} if self.has_images else {})
        )


def _refuse_pictures(rows: Sequence[DataRow], prompt_key: str) -> None:
    """Raises DataError for a whole conversation with pictures."""
    for row in rows:
        if row.values.get(IMAGES):
            raise row.problem(
                IMAGES, f"a row with pictures needs a prompt (data.prompt_key={prompt_key}) and a response, no {MESSAGES!r}"
            )


def _of_pairs(
    config: SFTDataConfig, tokenizer: Tokenizer, rows: Sequence[DataRow], reader: ImagePrompts | None
) -> list[Demonstration]:
    encoded = encode_prompts(tokenizer, rows, config.prompt_key, None, reader)
    texts = [checked_text(row, config.response_key, row.get(config.response_key)) for row in rows]
    responses = [ended(tokenizer, tokens) for tokens in encode(tokenizer, texts, add_special_tokens=False)]
    return [
        Demonstration(tokens=[*prompt, *response], learned=[0] * len(prompt) + [1] * len(response), images=images)
        for prompt, response, images in zip(encoded.ids, responses, encoded.images, strict=True)
    ]


def _of_messages(tokenizer: Tokenizer, row: DataRow) -> Demonstration:
    """Returns the conversation up to its last assistant turn, tokenized as generation sees it turn by turn."""
    pieces = _pieces(tokenizer, row, checked_messages(row, MESSAGES, row.get(MESSAGES)))
    item = _whole(tokenizer, pieces) or _piecewise(tokenizer, pieces)
    item.tokens = ended(tokenizer, item.tokens)
    item.learned += [1] * (len(item.tokens) - len(item.learned))
    return item


def _tools(row: DataRow) -> dict[str, Any]:
    """Returns the chat template's arguments besides the messages."""
    tools = row.values.get(TOOLS)
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise row.problem(TOOLS, f"must be a list of JSON schemas, got {type(tools).__name__} {tools!r:.80}")
    return {TOOLS: tools}


def _whole(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> Demonstration | None:
    """Tokenizes all pieces as one text; None where a token lies across the border of two.

    A piece alone would not do: many tokenizers put a space before the first word of every text.
    """
    if not tokenizer.is_fast:
        return None
    encoded = tokenizer(["".join(text for text, _ in pieces)], add_special_tokens=False, return_offsets_mapping=True)
    ends = np.cumsum([len(text) for text, _ in pieces])
    spans = np.asarray(encoded["offset_mapping"][0], dtype=np.int64).reshape(-1, 2)
    piece = np.searchsorted(ends, spans[:, 0], side="right").clip(max=len(pieces) - 1)
    if (spans[:, 1] > ends[piece]).any():
        return None
    is_answer = np.asarray([answer for _, answer in pieces], dtype=np.int64)
    return Demonstration(tokens=list(encoded["input_ids"][0]), learned=is_answer[piece].tolist())


def _piecewise(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> Demonstration:
    item = Demonstration(tokens=[], learned=[])
    encoded = encode(tokenizer, [text for text, _ in pieces], add_special_tokens=False)
    for (_, is_answer), tokens in zip(pieces, encoded, strict=True):
        item.tokens += tokens
        item.learned += [int(is_answer)] * len(tokens)
    return item


def _pieces(tokenizer: Tokenizer, row: DataRow, messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Returns the chat template's text cut into `(text, written by the assistant)`, the last piece an answer."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise row.problem(MESSAGES, "needs an assistant turn, and a turn before it")
    render = partial(render_chat, tokenizer, row, MESSAGES, kwargs=_tools(row))
    pieces: list[tuple[str, bool]] = []
    done = 0
    whole = render(messages[: turns[-1] + 1], generation=False)
    for turn in turns:
        before = render(messages[:turn], generation=True)
        after = render(messages[: turn + 1], generation=False)
        if not after.startswith(before) or not whole.startswith(after):
            text = f"the chat template rewrites turns before message {turn}; give each answer a row, as prompt and response"
            raise row.problem(MESSAGES, text)
        end = end_of_answer(after, len(before), tokenizer.eos_token)
        pieces += [(whole[done : len(before)], False), (whole[len(before) : end], True)]
        done = end
    return [piece for piece in pieces if piece[0]]


def _cut(config: SFTDataConfig, row: DataRow, item: Demonstration) -> Demonstration:
    """Cuts a demonstration to `config.max_length`, or raises DataError."""
    size = len(item.tokens)
    check_whole(row, size, item.images, "data.max_length", config.max_length)
    if size > config.max_length and config.truncation == "error":
        raise DataError(
            f"{row.file}, row {row.number}: {size} tokens exceed data.max_length={config.max_length}; raise it, or set "
            "data.truncation=left, right or middle"
        )
    cut = Demonstration(
        tokens=list(truncate(item.tokens, config.max_length, config.truncation)),
        learned=list(truncate(item.learned, config.max_length, config.truncation)),
        images=item.images,
    )
    if 1 not in cut.learned[1:]:
        raise DataError(
            f"{row.file}, row {row.number}: of {size} tokens no response token is left (data.max_length={config.max_length})"
        )
    return cut


@dataclass(slots=True, kw_only=True)
class Pair:
    """Token ids of a preference pair, and the margin by which the chosen answer should win (0 where the data have none)."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


class PreferenceDataset:
    """All pairs of the files, tokenized.

    A row has a prompt (text or chat messages) and two answers: texts, or messages.  Messages are the assistant's alone, after
    a prompt of messages, or two whole conversations that differ in their last message; `prompt_key` is not read then.
    The end-of-sequence token belongs to an answer.  Pairs over `config.max_length` tokens are an error or cut by
    `config.truncation`; pairs whose answers are the same teach nothing, and are counted and left out.  margin_key: column of
    margins.  Raises DataError, which names file, row and column.  vocab_size: see PromptDataset.
    """

    def __init__(
        self,
        config: PreferenceDataConfig,
        files: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        margin_key: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        check_policy(config.truncation)
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token, so the end of an answer could not be judged")
        self.pad_id = pad_id(tokenizer)
        self.margin_key = margin_key
        rows = load_rows(files)
        found = _tokenized(config, tokenizer, rows)
        check_vocabulary(rows, config.chosen_key, [[*pair.prompt, *pair.chosen] for pair in found], vocab_size)
        check_vocabulary(rows, config.rejected_key, [pair.rejected for pair in found], vocab_size)
        pairs = [_cut_pair(config, row, pair) for row, pair in zip(rows, found, strict=True)]
        if margin_key is not None:
            for row, pair in zip(rows, pairs, strict=True):
                pair.margin = _number(row, margin_key)
        self.pairs = _without_ties(rows, pairs)
        self.fingerprint = fingerprint_of([dataclasses.astuple(pair) for pair in self.pairs])

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, indices: np.ndarray) -> DataProto:
        """Returns those pairs, the chosen answer first: `input_ids` and `attention_mask` (pairs, 2, P + T), `responses` and
        `response_mask` (pairs, 2, T), all int64; with a margin_key `margin` (pairs,) float64.  Prompts are left padded,
        answers right padded."""
        pairs = [self.pairs[index] for index in indices]
        answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
        prompts = [pair.prompt for pair in pairs for _ in range(2)]
        responses, response_mask = right_padded(answers, self.pad_id), right_padded([[1] * len(answer) for answer in answers], 0)
        prompt_mask = left_padded([[1] * len(prompt) for prompt in prompts], 0)
        columns = {
            "input_ids": np.concatenate([left_padded(prompts, self.pad_id), responses], axis=1),
            "attention_mask": np.concatenate([prompt_mask, response_mask], axis=1),
            "responses": responses,
            "response_mask": response_mask,
        }
        tensors = {name: torch.from_numpy(column).view(len(pairs), 2, -1) for name, column in columns.items()}
        if self.margin_key is not None:
            tensors["margin"] = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
        return DataProto.from_dict(tensors)


def _tokenized(config: PreferenceDataConfig, tokenizer: Tokenizer, rows: Sequence[DataRow]) -> list[Pair]:
    prompted = [_with_prompt(config, row) for row in rows]
    encoded = encode_prompts(tokenizer, prompted, config.prompt_key, None)
    answers = [
        _answer(tokenizer, row, column, config.prompt_key, text)
        for row, text in zip(prompted, encoded.texts, strict=True)
        for column in (config.chosen_key, config.rejected_key)
    ]
    ids = [ended(tokenizer, tokens) for tokens in encode(tokenizer, answers, add_special_tokens=False)]
    return [
        Pair(prompt=list(prompt), chosen=ids[2 * index], rejected=ids[2 * index + 1]) for index, prompt in enumerate(encoded.ids)
    ]


def _with_prompt(config: PreferenceDataConfig, row: DataRow) -> DataRow:
    """Returns the row, where conversations become a prompt of the messages they share and one message for each answer."""
    chosen, rejected = row.get(config.chosen_key), row.get(config.rejected_key)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise row.problem(config.rejected_key, f"must have the form of {config.chosen_key!r}: both texts, or both messages")
    if isinstance(chosen, str):
        return row
    won, lost = (_conversation(config, row, column) for column in (config.chosen_key, config.rejected_key))
    if won[:-1] != lost[:-1]:
        raise row.problem(config.rejected_key, f"must be the conversation of {config.chosen_key!r} up to its last message")
    answers = {config.chosen_key: won[-1], config.rejected_key: lost[-1]}
    return dataclasses.replace(row, values={**row.values, config.prompt_key: won[:-1], **answers})


def _conversation(config: PreferenceDataConfig, row: DataRow, column: str) -> list[dict[str, Any]]:
    """Returns the column's messages: at least two, of which the last is the assistant's."""
    messages = checked_messages(row, column, row.get(column))
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        messages = [*checked_messages(row, config.prompt_key, row.get(config.prompt_key)), *messages]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise row.problem(column, "must be one message of the assistant, or a conversation that ends with one")
    return messages


def _answer(tokenizer: Tokenizer, row: DataRow, column: str, prompt_key: str, prompt: str) -> str:
    """Returns the answer's text as it follows the prompt's text.  row: as `_with_prompt` returned it."""
    value = row.values[column]
    if isinstance(value, str):
        return checked_text(row, column, value)
    whole = render_chat(tokenizer, row, column, [*row.values[prompt_key], value], generation=False)
    if not whole.startswith(prompt):
        raise row.problem(column, "the chat template rewrites earlier turns; give the prompt as messages and the answers as text")
    return checked_text(row, column, whole[len(prompt) : end_of_answer(whole, len(prompt), tokenizer.eos_token)])


def _cut_pair(config: PreferenceDataConfig, row: DataRow, pair: Pair) -> Pair:
    """Cuts a pair to `config.max_length`, or raises DataError.  "left" cuts the same tokens of the prompt for both answers."""
    size = len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
    excess, limit = size - config.max_length, f"data.max_length={config.max_length}"
    if excess <= 0:
        return pair
    if config.truncation == "error":
        raise DataError(f"{row.file}, row {row.number}: {size} tokens exceed {limit}; raise it, or set data.truncation")
    if config.truncation == "left":
        pair.prompt = pair.prompt[excess:]
    else:
        most = max(config.max_length - len(pair.prompt), 0)
        pair.chosen, pair.rejected = pair.chosen[:most], pair.rejected[:most]
    if not (pair.prompt and pair.chosen and pair.rejected):
        left = "prompt" if config.truncation == "left" else "answer"
        raise DataError(f"{row.file}, row {row.number}: of {size} tokens nothing of the {left} is left ({limit})")
    return pair


def _number(row: DataRow, column: str) -> float:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise row.problem(column, f"must be a finite number, got {type(value).__name__} {value!r:.80}")
    return float(value)


def _without_ties(rows: Sequence[DataRow], pairs: Sequence[Pair]) -> list[Pair]:
    """Returns the pairs whose answers differ."""
    same = [row for row, pair in zip(rows, pairs, strict=True) if pair.chosen == pair.rejected]
    if not same:
        return list(pairs)
    text = (
        f"{len(same)} of {len(rows)} pairs have the same chosen and rejected answer (first: {same[0].file}, row {same[0].number})"
    )
    if len(same) == len(rows):
        raise DataError(f"{text}: nothing is left to learn from")
    logger.warning("%s; they say nothing and are left out", text)
    return [pair for pair in pairs if pair.chosen != pair.rejected]
