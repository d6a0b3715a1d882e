"""Pictures in the rows of a file: the column `images`, and the messages that say where they stand.

A row has its pictures as image files, in the order of their places: bytes, the struct {bytes, path} of parquet's image features,
or paths, which are relative to the data file's folder.  Their places are parts {"type": "image"} of the messages' content, or
"<image>" in a content that is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlhub.data.files import DataRow
from rlhub.protocol.sequences import IMAGES

MARK = "<image>"
"""A picture's place in a content that is text."""


class ImagePrompts(Protocol):
    """Knows how pictures enter the prompts of a model."""

    def expand(self, text: str, files: Sequence[bytes]) -> str:
        """Returns the text with all image tokens of each picture.  Raises ValueError for what cannot be a prompt."""
        ...


def row_images(row: DataRow, reader: ImagePrompts | None) -> list[bytes]:
    """Returns the row's image files; [] without the column.  Raises DataError for what is no file, and for a model that reads no
    images."""
    value = row.values.get(IMAGES)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not value:
        return []
    if not isinstance(value, list):
        value = [value]
    if reader is None:
        raise row.problem(IMAGES, "has pictures, but the model reads text alone; name a vision-language model or drop the column")
    return [_file(row, number, item) for number, item in enumerate(value)]


def _file(row: DataRow, number: int, item: Any) -> bytes:
    """Returns the bytes of one picture."""
    given = item
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if isinstance(item, bytes) and item:
        return item
    if not isinstance(item, str) or not item:
        raise row.problem(IMAGES, f"picture {number} must be the bytes of an image file or a path, got {given!r:.80}")
    path = Path(row.file).parent / Path(item.removeprefix("file://")).expanduser()
    try:
        return path.read_bytes()
    except OSError as error:
        raise row.problem(IMAGES, f"picture {number} cannot be read: {error}") from error


def image_parts(row: DataRow, column: str, messages: Sequence[Mapping[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Returns the messages with contents that are lists of parts, with a place for each picture.

    Raises DataError for another number of places than pictures.
    """
    found = [{**message, "content": _parts(message["content"])} for message in messages]
    places = sum(part["type"] == "image" for message in found for part in message["content"])
    if places != num_images:
        raise row.problem(
            column,
            f"the messages have {places} places for pictures, and column {IMAGES!r} has {num_images}; a place is a part "
            f'{{"type": "image"}}, or {MARK} in a content that is text',
        )
    return found


def _parts(content: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [dict(part) for part in content]
    first, *others = content.split(MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part["type"] == "image" or part["text"]]


def check_whole(row: DataRow, num_tokens: int, images: bytes, setting: str, limit: int) -> None:
    """Raises DataError for a row with pictures that would be cut: no part of a picture's tokens may be missing."""
    if images and num_tokens > limit:
        raise row.problem(
            IMAGES,
            f"{num_tokens} tokens exceed {setting}={limit}, and a row with pictures cannot be cut: raise it or drop the row",
        )
