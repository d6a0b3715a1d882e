"""What a trainer of another job asks of a server: pause, new weights, resume.  With a key of its own, not that of clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from rlhub.agents.openai_server.bodies import read_flag
from rlhub.agents.openai_server.errors import ApiError, bad_field
from rlhub.errors import RequestError, RlhubError, VersionError


class Administration(Protocol):
    """What an administrator may ask of the engine behind the server: pause, resume, new weights, status."""

    @property
    def failure(self) -> str:
        """Why nothing can be generated now, until that is mended or whole weights come; "" while it can."""
        ...

    async def pause(self) -> None:
        """Sample nothing until `resume`; requests wait with their tokens."""
        ...

    async def resume(self, *, recompute: bool) -> None: ...

    async def reload(self, folder: str, version: int, *, reset_version: bool) -> dict[str, Any]:
        """Take the weights in `folder` as policy `version`, paused or not; what happened, for the log of who asked.

        RequestError for a folder that cannot be used, VersionError for a version that is not newer than the present one;
        reset_version: then too, for another run begins.  After both errors all is as it was.
        """
        ...

    async def status(self) -> dict[str, Any]:
        """JSON-able: version, load and the like."""
        ...


ReadBody = Callable[[web.Request], Awaitable[dict[str, Any]]]


def admin_routes(admin: Administration, admit: Callable[[web.Request], object], read_json: ReadBody) -> list[web.RouteDef]:
    """admit: ApiError for a wrong key."""

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
