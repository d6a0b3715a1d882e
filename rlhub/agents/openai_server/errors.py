"""What the endpoint answers when it cannot do what was asked: OpenAI's error object, with the field that is at fault; and the
reading of a request's body, the first place where one can be.

JSON is read in bounded time, and nothing in it can surprise who works with it: nesting is bounded because templates, messages and
comparisons recurse; texts are whole Unicode because tokenizers and answers write them as UTF-8.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from rlhub.errors import DeadlineError, RequestError, RlhubError

logger = logging.getLogger(__name__)


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")
RETRY_S = 2.0  # until an engine that is being built anew may be there


class ApiError(RlhubError, ValueError):
    """Fields: `status` (HTTP), `kind` and `code` (OpenAI's `type` and `code`), `param` (the field), `retry_after_s`."""

    status: int
    kind: str
    param: str | None
    code: str | None
    retry_after_s: float | None

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status, kind=kind, param=param, code=code, retry_after_s=retry_after_s)

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def bad_field(param: str, got: Any, expected: str) -> ApiError:
    """400: the value of a field is not what it must be."""
    return ApiError(f"{param}: got {got!r:.200}, expected {expected}", param=param)


def unsupported(param: str, why: str) -> ApiError:
    """400: a field that would change the answer and that no engine here can follow."""
    return ApiError(f"{param}: {why}", param=param, code="unsupported_parameter")


def unavailable(why: str) -> ApiError:
    """503: the engine has failed, or has no whole weights; later it may be there again."""
    return ApiError(
        f"the engine cannot generate now: {why}",
        status=503,
        kind="server_error",
        code="engine_unavailable",
        retry_after_s=RETRY_S,
    )


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's format."""
    try:
        return await handler(request)
    except Exception as error:  # noqa: BLE001  the request's boundary
        failed = as_api_error(request, error)
    headers = {"Retry-After": f"{failed.retry_after_s:g}"} if failed.retry_after_s is not None else None
    return web.json_response(failed.body, status=failed.status, headers=headers)


def as_api_error(request: web.Request, error: Exception) -> ApiError:
    """What the client is told of an error; what nobody has foreseen is logged, and 500."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(str(error), param=error.param or None)
        case DeadlineError():
            return ApiError(str(error), status=504, kind="server_error", code="deadline_exceeded")
        case web.HTTPException():
            known = f"; there are {', '.join(PATHS)}" if error.status == HTTPStatus.NOT_FOUND else ""
            return ApiError(f"{request.method} {request.path}: {error.reason}{known}", status=error.status)
        case _:
            logger.error("%s %s failed", request.method, request.path, exc_info=error)
            return ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error")


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
