"""Prompt text or chat messages -> token ids, with errors that name the row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2
import numpy as np

from rlhub.data.files import DataRow
from rlhub.data.images import ImagePrompts, image_parts, row_images
from rlhub.errors import DataError
from rlhub.protocol.sequences import IMAGES, pack_files

_BATCH = 1024
"""Texts a call: enough for a fast tokenizer to use its threads."""

TRUNCATIONS = ("error", "left", "right", "middle")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    pad_token_id: int | None
    eos_token_id: int | None
    eos_token: str | None
    chat_template: Any
    is_fast: bool  # knows the characters of each token

    def __call__(
        self, text: list[str], *, add_special_tokens: bool, return_offsets_mapping: bool = False
    ) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


def pad_id(tokenizer: Tokenizer) -> int:
    """Returns the id that fills short rows.  Raises DataError if the tokenizer has none."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise DataError("the tokenizer has neither a pad token nor an end-of-sequence token to pad with")
    return int(found)


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Returns the token ids of each text."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _BATCH):
        ids += tokenizer(list(texts[start : start + _BATCH]), add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def checked_text(row: DataRow, column: str, value: Any) -> str:
    """Returns `value`.  Raises DataError unless it is text that can be written as UTF-8 and is not blank."""
    if not isinstance(value, str):
        raise row.problem(column, f"must be text, got {type(value).__name__} {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise row.problem(column, f"is not valid Unicode: {error}") from error
    if not value.strip():
        raise row.problem(column, "is empty")
    return value


def checked_messages(row: DataRow, column: str, value: Any, *, parts: bool = False) -> list[dict[str, Any]]:
    """Returns `value` as chat messages: a list of {"role": text, "content": text, ...}; null entries (parquet's filling) dropped.
    A message of nothing but tool calls has an empty content.

    parts: True allows a content that is a list of parts: {"type": "text", "text": text}, or a picture's place {"type": "image"}.
    """
    messages = list(value) if isinstance(value, (list, tuple, np.ndarray)) else []
    if not messages:
        raise row.problem(column, f"must be chat messages (a list with at least one), got {type(value).__name__} {value!r:.80}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise row.problem(column, f"message {index} must have a text 'role' and a text 'content', got {message!r:.80}")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        if parts and isinstance(content, (list, np.ndarray)) and len(content):
            _check_parts(row, column, index, content)
        elif not isinstance(content, str):
            raise row.problem(column, f"message {index}: 'content' must be text, got {type(content).__name__}")
        elif content:
            checked_text(row, column, content if content.strip() else "blank")
    return [{"content": "", **_without_null(message)} for message in messages]


def _without_null(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a message that are not null, those of the parts of its content too."""
    found = {key: item for key, item in message.items() if item is not None}
    if isinstance(found.get("content"), (list, np.ndarray)):
        found["content"] = [{key: item for key, item in part.items() if item is not None} for part in found["content"]]
    return found


def _check_parts(row: DataRow, column: str, index: int, content: Any) -> None:
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            checked_text(row, column, part.get("text"))
        elif kind != "image":
            raise row.problem(
                column,
                f'message {index}: a part of \'content\' must be a {{"type": "text"}} or {{"type": "image"}}, got {part!r:.80}',
            )


def render_chat(
    tokenizer: Tokenizer,
    row: DataRow,
    column: str,
    messages: list[dict[str, Any]],
    *,
    generation: bool,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Returns the chat template's text; with `generation` it ends where the assistant's answer begins."""
    if not tokenizer.chat_template:
        raise row.problem(
            column,
            "holds chat messages, but the tokenizer has no chat template; use a tokenizer with one, or text prompts",
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation, **(kwargs or {}))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise row.problem(column, f"the chat template refuses these messages: {error}") from error
    return checked_text(row, column, text)


@dataclass(slots=True, kw_only=True)
class EncodedPrompts:
    """Prompts as the model reads them: their texts, in which a picture is one token, their token ids, in which it has all of its
    own, and the pictures' files by `pack_files`, b"" without any."""

    texts: list[str]
    ids: list[list[int]]
    images: list[bytes]


def encode_prompts(
    tokenizer: Tokenizer,
    rows: Sequence[DataRow],
    column: str,
    chat_kwargs: Mapping[str, Any] | None,
    reader: ImagePrompts | None = None,
) -> EncodedPrompts:
    """Returns prompts as the model reads them.  reader: of the pictures in them, if the model reads some.

    A text prompt is tokenized as it is, with the special tokens that the tokenizer adds by itself; chat messages go through
    the chat template, whose text already has its special tokens.
    """
    texts: list[str] = []
    expanded: list[str] = []
    chats: list[bool] = []
    images = [row_images(row, reader) for row in rows]
    for row, files in zip(rows, images, strict=True):
        value = row.get(column)
        chats.append(not isinstance(value, (str, float, int)))
        if chats[-1]:
            messages = checked_messages(row, column, value, parts=True)
            if reader is not None or any(isinstance(message["content"], list) for message in messages):
                messages = image_parts(row, column, messages, len(files))
            texts.append(render_chat(tokenizer, row, column, messages, generation=True, kwargs=chat_kwargs))
        else:
            texts.append(checked_text(row, column, value))
        expanded.append(_expanded(row, texts[-1], files, reader))
    ids: list[list[int]] = [[] for _ in rows]
    for chat in (False, True):
        chosen = [index for index, is_chat in enumerate(chats) if is_chat == chat]
        for index, tokens in zip(
            chosen, encode(tokenizer, [expanded[index] for index in chosen], add_special_tokens=not chat), strict=True
        ):
            ids[index] = tokens
    for row, tokens in zip(rows, ids, strict=True):
        if not tokens:
            raise row.problem(column, "has no tokens")
    return EncodedPrompts(texts=texts, ids=ids, images=[pack_files(files) for files in images])


def _expanded(row: DataRow, text: str, files: Sequence[bytes], reader: ImagePrompts | None) -> str:
    """Returns a prompt's text with all image tokens of its pictures."""
    if not files or reader is None:
        return text
    try:
        return reader.expand(text, files)
    except ValueError as error:
        raise row.problem(IMAGES, str(error)) from error


def check_vocabulary(rows: Sequence[DataRow], column: str, ids: Sequence[Sequence[int]], vocab_size: int | None) -> None:
    """Raises DataError for the first row with a token id for which the model has no embedding.  vocab_size: None if unknown."""
    if vocab_size is None:
        return
    for row, tokens in zip(rows, ids, strict=True):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            place, token = next((place, token) for place, token in enumerate(tokens) if not 0 <= token < vocab_size)
            raise row.problem(
                column,
                f"token {place} of its tokens has id {token}, and the model's embedding has {vocab_size} rows: the "
                "tokenizer is another model's, or got tokens without a resized embedding",
            )


def end_of_answer(text: str, start: int, eos: str | None) -> int:
    """Returns the end of the answer that begins at `start`.

    Templates write for example a line break after the end-of-sequence token (or another token that ends a turn), which a model
    never samples.
    """
    found = text.rfind(eos, start) if eos else -1
    return max(start, len(text.rstrip())) if found < 0 or eos is None else found + len(eos)


def ended(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Returns the tokens with the end-of-sequence token as their last, if the tokenizer has one."""
    eos = tokenizer.eos_token_id
    return tokens if eos is None or (tokens and tokens[-1] == eos) else [*tokens, eos]


def truncate(tokens: Sequence[int], limit: int, policy: str) -> Sequence[int]:
    """Returns at most `limit` entries: "left" drops the first, "right" the last, "middle" keeps both ends."""
    if len(tokens) <= limit:
        return tokens
    if policy == "left":
        return tokens[len(tokens) - limit :]
    if policy == "right":
        return tokens[:limit]
    head = limit // 2
    return [*tokens[:head], *tokens[len(tokens) - (limit - head) :]]


def check_policy(policy: str) -> None:
    if policy not in TRUNCATIONS:
        raise DataError(f"data.truncation is {policy!r}; known: {', '.join(TRUNCATIONS)}")


def left_padded(rows: Sequence[Sequence[int]], fill: int) -> np.ndarray:
    """Returns (rows, longest) int64, short rows filled on the left."""
    width = max(map(len, rows), default=0)
    out = np.full((len(rows), width), fill, dtype=np.int64)
    for line, tokens in zip(out, rows, strict=True):
        line[width - len(tokens) :] = tokens
    return out


def right_padded(rows: Iterable[Sequence[int]], fill: int) -> np.ndarray:
    """Returns (rows, longest) int64, short rows filled on the right."""
    return np.ascontiguousarray(left_padded([row[::-1] for row in rows], fill)[:, ::-1])
