"""The messages between a driver and its children: one JSON text per line, without pickle.

JSON is used because a line may come from code that was never checked: reading it can at worst fail.  Only the standard library is
used, because every child imports this module.
"""

from __future__ import annotations

import base64
import datetime
import json
from typing import Any

BYTES_TAG = "__bytes__"


class WireError(ValueError):
    """A value that has no JSON form, or a line that is not JSON."""


def encode(value: Any) -> bytes:
    """Returns the value as one line.  Arrays, tensors and sets become lists, dates become ISO text, and bytes stay bytes; any
    other type raises WireError."""
    try:
        return _ENCODER.encode(value).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(str(error)) from error


def decode(line: bytes) -> Any:
    """Returns the value of a line; WireError if it is none."""
    try:
        return _DECODER.decode(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a JSON line: {line[:80]!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return {BYTES_TAG: base64.b64encode(value).decode("ascii")}
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    try:
        return value.tolist()  # numpy arrays and scalars, torch tensors: without importing either
    except (AttributeError, TypeError, RuntimeError) as error:
        raise TypeError(f"a value of type {type(value).__name__} cannot be sent") from error


def _restore(mapping: dict[str, Any]) -> Any:
    if len(mapping) == 1 and isinstance(mapping.get(BYTES_TAG), str):
        return base64.b64decode(mapping[BYTES_TAG])
    return mapping


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"))  # made once: json.dumps with arguments makes one a call
_DECODER = json.JSONDecoder(object_hook=_restore)
