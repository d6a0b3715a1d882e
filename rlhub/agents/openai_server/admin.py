"""The administration routes, by which a trainer of another job pauses a server, loads new weights and resumes it.

They have a key of their own, which clients do not know.

The server's numbers for Prometheus are here too:

rlhub_requests_total{wire, status}      requests by their path and the status of their answer
rlhub_request_seconds{wire}             time of a request until its answer was sent, as a histogram
rlhub_prompt_tokens_total               tokens of prompts, once for all answers to a prompt
rlhub_generated_tokens_total            tokens that were sampled
rlhub_requests_running                  requests that are being answered
rlhub_sessions_open                     sessions that take requests
rlhub_engine_requests, rlhub_weights_version, rlhub_paused: of the engine, where the server has an administration
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rlhub.agents.openai_server.answers import Answer, usage
from rlhub.agents.openai_server.bodies import read_flag
from rlhub.agents.openai_server.errors import ApiError, Handler, bad_field
from rlhub.errors import RequestError, RlhubError, VersionError

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Bounds of the histogram's buckets: from a short answer of a small model to an episode that waits for a pause."""
ENGINE = {"load": "rlhub_engine_requests", "version": "rlhub_weights_version", "paused": "rlhub_paused"}
"""Key of the administration's status -> the gauge that shows it."""
RUNNING, SESSIONS = "rlhub_requests_running", "rlhub_sessions_open"
GAUGES = {
    RUNNING: "Requests that are being answered.",
    SESSIONS: "Sessions that take requests.",
    "rlhub_engine_requests": "Requests that wait or run in the engine.",
    "rlhub_weights_version": "Version of the policy that samples.",
    "rlhub_paused": "Whether sampling is paused.",
}


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


class ServerMetrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ["wire", "status"]
        self._requests = Counter("rlhub_requests", "Requests by path and status of the answer.", labels, registry=registry)
        about = "Seconds until the answer was sent."
        self._seconds = Histogram("rlhub_request_seconds", about, ["wire"], buckets=SECONDS, registry=registry)
        self._prompt = Counter("rlhub_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._generated = Counter("rlhub_generated_tokens", "Tokens that were sampled.", registry=registry)
        self._gauges: dict[str, Gauge] = {}

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts a request and measures its time; the status of a client that has left is 499."""
        begun, status = time.monotonic(), 499
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            wire = _wire(request)
            self._requests.labels(wire, str(status)).inc()
            self._seconds.labels(wire).observe(time.monotonic() - begun)

    def add_answers(self, answers: Sequence[Answer], n: int) -> None:
        """Counts the tokens of a request's answers; n: answers to one prompt."""
        counts = usage(answers, n)
        self._prompt.inc(counts["prompt_tokens"])
        self._generated.inc(counts["completion_tokens"])

    def text(self, running: int, sessions: int, engine: Mapping[str, Any]) -> web.Response:
        """Returns all numbers in Prometheus's text format.  engine: the administration's status."""
        values = {RUNNING: float(running), SESSIONS: float(sessions)}
        values |= {name: float(engine[key]) for key, name in ENGINE.items() if key in engine}
        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, GAUGES[name], registry=self._registry)
            self._gauges[name].set(value)
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _wire(request: web.Request) -> str:
    """Returns the path without what names a session or a model, so that labels are few."""
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else "unknown"
    return path.rpartition("/v1/")[2] or path
