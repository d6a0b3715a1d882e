"""OpenAI's error object, with the field at fault, and the reading of JSON bodies, which is the first place where an error can
occur.

JSON is read in bounded time, and its content is checked once for all later code: nesting is bounded, because templates, messages
and comparisons recurse, and all text is valid Unicode, because tokenizers and answers write it as UTF-8.
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
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/v1/models")
MESSAGES = ("/messages", "/messages/count_tokens")
"""The ends of the paths whose errors have Anthropic's form."""
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> Anthropic's kind of error, for those that have one of their own."""
RETRY_S = 2.0  # until an engine that is being rebuilt may be available
MAX_DEPTH = 64
"""Maximum nesting of objects and lists; schemas of tools have about 10 levels."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(RlhubError, ValueError):
    """An error response.  Fields: `status` (HTTP), `kind` and `code` (OpenAI's `type` and `code`), `param` (the field at fault)
    and `retry_after_s`."""

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
        """Returns the JSON of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def messages_body(self) -> dict[str, Any]:
        """Returns the JSON of the response in the form of Anthropic's Messages interface."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}, "request_id": None}


def bad_field(param: str, got: Any, expected: str) -> ApiError:
    """Returns the error 400 for a field with an invalid value."""
    return ApiError(f"{param}: got {got!r:.200}, expected {expected}", param=param)


def unsupported(param: str, why: str) -> ApiError:
    """Returns the error 400 for a field that would change the answer and that no engine here supports."""
    return ApiError(f"{param}: {why}", param=param, code="unsupported_parameter")


def unavailable(why: str) -> ApiError:
    """Returns the error 503 for an engine that has failed or has no whole weights; it may be available again later."""
    return ApiError(
        f"the engine cannot generate now: {why}",
        status=503,
        kind="server_error",
        code="engine_unavailable",
        retry_after_s=RETRY_S,
    )


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every error in the format of its interface."""
    try:
        return await handler(request)
    except Exception as error:  # noqa: BLE001  the request's boundary
        failed = as_api_error(request, error)
    headers = {"Retry-After": f"{failed.retry_after_s:g}"} if failed.retry_after_s is not None else None
    body = failed.messages_body if request.path.endswith(MESSAGES) else failed.body
    return web.json_response(body, status=failed.status, headers=headers)


def as_api_error(request: web.Request, error: Exception) -> ApiError:
    """Returns the error to send to the client.  An unexpected error is logged, and becomes status 500."""
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


async def read_json(request: web.Request, *, seconds: float, setting: str) -> dict[str, Any]:
    """Returns the body as a JSON object.  Raises ApiError 400 if it is none, and 408 if it has not arrived after `seconds`.

    setting: the name of that time limit, for the message.
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
    """Raises ApiError for too deep nesting or invalid text.  Walks level by level, because a recursion would overflow itself."""
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
