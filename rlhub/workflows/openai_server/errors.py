"""What the endpoint answers when it cannot do what was asked: OpenAI's error object, with the field that is at fault."""

from __future__ import annotations

from typing import Any

from rlhub.errors import RlhubError


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
