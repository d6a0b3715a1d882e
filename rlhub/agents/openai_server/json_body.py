"""A request's body: JSON that is read in bounded time, and of which nothing can surprise who works with it.

Nesting is bounded because templates, messages and comparisons recurse; texts are whole Unicode because tokenizers and answers
write them as UTF-8.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from rlhub.agents.openai_server.errors import ApiError

MAX_DEPTH = 64
"""Objects and lists within each other; schemas of tools have about 10."""


async def read_json(request: web.Request, *, seconds: float, setting: str) -> dict[str, Any]:
    """The body, which must be a JSON object.  ApiError 400 where it is none, 408 where it has not come after so many seconds.

    setting: what names that time, for the message.
    """
    try:
        async with asyncio.timeout(seconds):
            raw = await request.read()
    except TimeoutError:
        request.protocol.close()  # after the answer
        message = f"the body did not come within {setting}={seconds:g} s"
        raise ApiError(message, status=408, code="request_timeout") from None
    try:
        body = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON in UTF-8 that can be read: {type(error).__name__}: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {type(body).__name__}")
    _check(body)
    return body


def _check(body: dict[str, Any]) -> None:
    """Level by level, for a recursion would meet what it looks for."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            parts = [*item.keys(), *item.values()] if isinstance(item, dict) else item
            if {str, dict, list}.isdisjoint(map(type, parts)):  # numbers alone, of which prompts have many
                continue
            for part in parts:
                if isinstance(part, str):
                    _check_text(part)
                elif isinstance(part, dict | list):
                    below.append(part)
        if not below:
            return
        level = below
    raise ApiError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(text[error.start]):04x}"
        raise ApiError(f"a text has a lone surrogate ({lone} at character {error.start}), which is no Unicode text") from None
