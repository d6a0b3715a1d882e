"""Preference pairs: a prompt with an answer that was chosen and one that was rejected.

Both answers of a pair follow the same prompt tokens, for the losses are derived for that; prompts and answers are tokenized
as generation would meet them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlhub.config.sections.preference import PreferenceDataConfig
from rlhub.data.files import DataRow, load_rows
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
)
from rlhub.errors import DataError
from rlhub.protocol import DataProto

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Pair:
    """Token ids, and the margin by which the chosen answer should win (0 where the data say nothing)."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


class PreferenceDataset:
    """All pairs of the files, tokenized.

    A row has a prompt (text or chat messages) and two answers: texts, or messages.  Messages are the assistant's alone, after
    a prompt of messages, or two whole conversations that differ in their last message; `prompt_key` is not read then.
    The end-of-sequence token belongs to an answer.  Pairs over `config.max_length` tokens are an error or cut by
    `config.truncation`; pairs whose answers are the same say nothing, are counted and left out.  margin_key: column of
    margins.  DataError names file, row and column.  vocab_size: see PromptDataset.
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
        pairs = [_cut(config, row, pair) for row, pair in zip(rows, found, strict=True)]
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
    texts, prompts = encode_prompts(tokenizer, prompted, config.prompt_key, None)
    answers = [
        _answer(tokenizer, row, column, config.prompt_key, text)
        for row, text in zip(prompted, texts, strict=True)
        for column in (config.chosen_key, config.rejected_key)
    ]
    encoded = [ended(tokenizer, tokens) for tokens in encode(tokenizer, answers, add_special_tokens=False)]
    return [
        Pair(prompt=list(prompt), chosen=encoded[2 * index], rejected=encoded[2 * index + 1])
        for index, prompt in enumerate(prompts)
    ]


def _with_prompt(config: PreferenceDataConfig, row: DataRow) -> DataRow:
    """Returns the row, for conversations with the messages that both begin with as its prompt, and one message an answer."""
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
    """Returns the column's messages: at least two, the last the assistant's."""
    messages = checked_messages(row, column, row.get(column))
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        messages = [*checked_messages(row, config.prompt_key, row.get(config.prompt_key)), *messages]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise row.problem(column, "must be one message of the assistant, or a conversation that ends with one")
    return messages


def _answer(tokenizer: Tokenizer, row: DataRow, column: str, prompt_key: str, prompt: str) -> str:
    """Returns the answer's text as it follows the prompt's.  row: one of `_with_prompt`."""
    value = row.values[column]
    if isinstance(value, str):
        return checked_text(row, column, value)
    whole = render_chat(tokenizer, row, column, [*row.values[prompt_key], value], generation=False)
    if not whole.startswith(prompt):
        raise row.problem(column, "the chat template rewrites earlier turns; give the prompt as messages and the answers as text")
    return checked_text(row, column, whole[len(prompt) : end_of_answer(whole, len(prompt), tokenizer.eos_token)])


def _cut(config: PreferenceDataConfig, row: DataRow, pair: Pair) -> Pair:
    """Cuts a pair to `config.max_length`, or raises DataError.  "left" takes the same tokens from the prompt for both answers."""
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
