"""What a trainer of another job asks of a server: pause, new weights, resume.  With the server's own key only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aiohttp import web

from rlhub.errors import RlhubError
from rlhub.workflows.openai_server.errors import ApiError, bad_field


class Administration(Protocol):
    """Of the engine behind the server."""

    async def pause(self) -> None:
        """Sample nothing until `resume`; requests wait with their tokens."""
        ...

    async def resume(self, *, recompute: bool) -> None: ...

    async def reload(self, folder: str, version: int) -> dict[str, Any]:
        """Take the weights in `folder` as policy `version`, paused or not; what happened, for the log of who asked."""
        ...

    async def status(self) -> dict[str, Any]:
        """JSON-able: version, load and the like."""
        ...


def admin_routes(admin: Administration, admit: Callable[[web.Request], object]) -> list[web.RouteDef]:
    """admit: ApiError for a wrong key."""

    async def pause(request: web.Request) -> web.Response:
        admit(request)
        await _done(admin.pause())
        return web.json_response(await admin.status())

    async def resume(request: web.Request) -> web.Response:
        admit(request)
        body = await read_json(request)
        await _done(admin.resume(recompute=bool(body.get("recompute", True))))
        return web.json_response(await admin.status())

    async def reload(request: web.Request) -> web.Response:
        admit(request)
        body = await read_json(request)
        folder, version = body.get("folder"), body.get("version")
        if not isinstance(folder, str) or not folder:
            raise bad_field("folder", folder, "a folder that the server reaches")
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise bad_field("version", version, "the policy's version, an integer of at least 0")
        return web.json_response(await _done(admin.reload(folder, version)))

    async def status(request: web.Request) -> web.Response:
        admit(request)
        return web.json_response(await admin.status())

    return [
        web.post("/admin/pause", pause),
        web.post("/admin/resume", resume),
        web.post("/admin/weights", reload),
        web.get("/admin/status", status),
    ]


async def _done(work: Any) -> Any:
    try:
        return await work
    except RlhubError as error:
        raise ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error") from error


async def read_json(request: web.Request) -> Any:
    """The body.  ApiError if it is no JSON object."""
    try:
        body = await request.json()
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {type(body).__name__}")
    return body
