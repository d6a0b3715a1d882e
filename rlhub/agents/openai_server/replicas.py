"""The administration of replicas over HTTP: who serves, one more, one less.

    GET    /admin/replicas             the replicas, the bounds on their number, and the newest changes with their reasons
    POST   /admin/replicas             begins to add one: 202 with its name, and GET shows how it goes on
    DELETE /admin/replicas/<name>      begins to remove one: 202; it ends when its requests have completed

404 says that there is no such replica, 409 that the bounds, or a change that runs, forbid it.  A training run listens on loopback
at a free port, and writes address and key to a file that its owner alone may read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from rlhub.agents.openai_server.errors import ApiError, errors
from rlhub.agents.openai_server.sessions import carries
from rlhub.errors import RequestError, ResourceError, RlhubError
from rlhub.utils.atomic import write_text

LOOPBACK = "127.0.0.1"
KEY_BYTES = 32
OWNER_ONLY = 0o600
REASON = "asked for over HTTP"
PATH = "/admin/replicas"


class ReplicaAdministration(Protocol):
    """Adds and removes the replicas behind an endpoint.  The methods return at once."""

    def describe(self) -> dict[str, Any]:
        """Returns the replicas, the bounds and the changes, as JSON-able values."""
        ...

    def begin_add(self, reason: str) -> Any:
        """Begins to add a replica.  Raises ResourceError where there are as many as may be."""
        ...

    def begin_remove(self, name: str, reason: str) -> Any:
        """Begins to remove a replica.  Raises RequestError for an unknown name, and ResourceError where it cannot be spared."""
        ...


def replica_routes(replicas: ReplicaAdministration, admit: Callable[[web.Request], object]) -> list[web.RouteDef]:
    """Returns the routes.  admit: raises ApiError for a request with a wrong key."""

    async def show(request: web.Request) -> web.Response:
        admit(request)
        return web.json_response(replicas.describe())

    async def add(request: web.Request) -> web.Response:
        admit(request)
        return _begun(replicas, lambda: replicas.begin_add(REASON))

    async def remove(request: web.Request) -> web.Response:
        admit(request)
        return _begun(replicas, lambda: replicas.begin_remove(request.match_info["name"], REASON))

    return [web.get(PATH, show), web.post(PATH, add), web.delete(f"{PATH}/{{name}}", remove)]


def _begun(replicas: ReplicaAdministration, begin: Callable[[], Any]) -> web.Response:
    try:
        change = begin()
    except RequestError as error:
        raise ApiError(str(error), status=404, param=error.param, code="replica_not_found") from error
    except ResourceError as error:
        raise ApiError(str(error), status=409, code="replicas_refused") from error
    except RlhubError as error:
        raise ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error") from error
    return web.json_response({"replica": change.replica, **replicas.describe()}, status=HTTPStatus.ACCEPTED)


class OneEngine:
    """The replicas of a server that has one engine: that engine.  failure: returns why it cannot generate now, or ""."""

    NAME = "engine"
    REMEDY = (
        "this server has one engine: start another server, and name it in rollout.remote.urls of the job that generates here, "
        "which adds and removes servers as its replicas"
    )

    def __init__(self, failure: Callable[[], str]) -> None:
        self._failure = failure

    def describe(self) -> dict[str, Any]:
        """Returns the engine as the only replica."""
        state = "failed" if self._failure() else "serving"
        return {"replicas": [{"name": self.NAME, "state": state}], "min_replicas": 1, "max_replicas": 1, "changes": []}

    def begin_add(self, reason: str) -> Any:
        """Raises ResourceError."""
        raise ResourceError(self.REMEDY)

    def begin_remove(self, name: str, reason: str) -> Any:
        """Raises ResourceError, and RequestError for a name that is not the engine's."""
        if name != self.NAME:
            raise RequestError(f"no replica {name!r}; there are: {self.NAME}", param="name")
        raise ResourceError(f"{self.NAME} is the last replica, and nothing would generate without it; {self.REMEDY}")


class AdminEndpoint:
    """Serves the administration of a run's replicas, on the event loop on which they are administered.

    file: gets {"url": ..., "key": ...} while the endpoint listens, readable by its owner alone.
    """

    def __init__(self, replicas: ReplicaAdministration, file: Path) -> None:
        self._replicas, self._file, self._key = replicas, file, secrets.token_urlsafe(KEY_BYTES)
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Starts to listen; returns the address, http://host:port."""
        app = web.Application(middlewares=[errors])
        app.router.add_routes(replica_routes(self._replicas, self._admit))
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        url = f"http://{LOOPBACK}:{self._runner.addresses[0][1]}"
        write_text(self._file, json.dumps({"url": url, "key": self._key}) + "\n", mode=OWNER_ONLY)
        return url

    def _admit(self, request: web.Request) -> None:
        if not carries(request.headers.get("Authorization", ""), self._key):
            told = f"wrong key: the run wrote it to {self._file.name} in its folder; send it as a bearer token"
            raise ApiError(told, status=401, code="invalid_api_key", kind="authentication_error")

    async def aclose(self) -> None:
        """Stops listening and removes the file.  Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            self._file.unlink(missing_ok=True)
