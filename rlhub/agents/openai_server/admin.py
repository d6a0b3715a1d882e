"""The administration routes, by which a trainer of another job pauses a server, loads new weights and resumes it.

They have a key of their own, which clients do not know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from rlhub.agents.openai_server.bodies import read_flag
from rlhub.agents.openai_server.errors import ApiError, bad_field
from rlhub.errors import RequestError, RlhubError, VersionError


class Administration(Protocol):
    """Controls the engine behind the server."""

    @property
    def failure(self) -> str:
        """Returns why the engine cannot generate now, or "" if it can.  A failure lasts until it is repaired or whole weights are
        loaded."""
        ...

    async def pause(self) -> None:
        """Stops sampling until `resume`; requests keep their tokens and wait."""
        ...

    async def resume(self, *, recompute: bool) -> None:
        """Continues sampling.  recompute: the KV cache of waiting requests is computed again under the current weights."""
        ...

    async def reload(self, folder: str, version: int, *, reset_version: bool) -> dict[str, Any]:
        """Loads the weights in `folder` as policy `version`, whether or not the server is paused; returns a report for the
        caller's log.

        Raises RequestError for a folder that cannot be used, and VersionError for a version that is not newer than the current
        one; with reset_version any version is allowed, for a new run.  After both errors the engine is unchanged.
        """
        ...

    async def status(self) -> dict[str, Any]:
        """Returns the version, the load and similar values, as JSON-able values."""
        ...


ReadBody = Callable[[web.Request], Awaitable[dict[str, Any]]]


def admin_routes(admin: Administration, admit: Callable[[web.Request], object], read_json: ReadBody) -> list[web.RouteDef]:
    """Returns the routes below /admin.  admit: raises ApiError for a request with a wrong key."""

    async def pause(request: web.Request) -> web.Response:
        admit(request)
        await _done(admin.pause())
        return web.json_response(await admin.status())

    async def resume(request: web.Request) -> web.Response:
        admit(request)
        body = await read_json(request)
        await _done(admin.resume(recompute=read_flag(body, "recompute", default=True)))
        return web.json_response(await admin.status())

    async def reload(request: web.Request) -> web.Response:
        admit(request)
        body = await read_json(request)
        folder, version = body.get("folder"), body.get("version")
        if not isinstance(folder, str) or not folder:
            raise bad_field("folder", folder, "a folder that the server reaches")
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise bad_field("version", version, "the policy's version, an integer of at least 0")
        anew = read_flag(body, "reset_version")
        return web.json_response(await _done(admin.reload(folder, version, reset_version=anew)))

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
    except VersionError as error:
        raise ApiError(str(error), status=409, param="version", code="version_conflict") from error
    except RequestError as error:
        raise ApiError(str(error), param=error.param or None) from error
    except RlhubError as error:
        raise ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error") from error
