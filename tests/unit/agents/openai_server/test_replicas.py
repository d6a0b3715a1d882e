"""Replicas over HTTP: the routes of a training run, and those of a server with one engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rlhub.agents.openai_server.errors import errors
from rlhub.agents.openai_server.replicas import PATH, AdminEndpoint, OneEngine, replica_routes
from rlhub.errors import EngineError, RequestError, ResourceError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Change:
    replica: str


@dataclass
class Few:
    """Two replicas at most."""

    names: list[str] = field(default_factory=lambda: ["rollout-0"])
    reasons: list[str] = field(default_factory=list)
    closed: bool = False

    def describe(self) -> dict[str, Any]:
        return {"replicas": [{"name": name} for name in self.names]}

    def begin_add(self, reason: str) -> Change:
        if self.closed:
            raise EngineError("the rollout service was closed")
        if len(self.names) == 2:
            raise ResourceError("there are 2 replicas")
        self.names.append("rollout-1")
        self.reasons.append(reason)
        return Change("rollout-1")

    def begin_remove(self, name: str, reason: str) -> Change:
        if name not in self.names:
            raise RequestError(f"no replica {name!r}", param="name")
        self.names.remove(name)
        return Change(name)


async def test_list_add_and_remove_with_the_key_of_the_file(tmp_path: Path) -> None:
    few = Few()
    endpoint = AdminEndpoint(few, tmp_path / "admin.json")
    url = await endpoint.start()
    place = json.loads((tmp_path / "admin.json").read_text())
    assert place["url"] == url and url.startswith("http://127.0.0.1:")
    assert (tmp_path / "admin.json").stat().st_mode & 0o777 == 0o600
    right = {"Authorization": f"Bearer {place['key']}"}
    async with aiohttp.ClientSession(url) as client:

        async def ask(method: str, path: str = PATH, headers: dict[str, str] = right) -> tuple[int, Any]:
            async with client.request(method, path, headers=headers) as answer:
                return answer.status, await answer.json()

        for method, path in (("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/rollout-0")):
            status, found = await ask(method, path, {"Authorization": "Bearer other"})
            assert status == 401 and "admin.json" in found["error"]["message"]
        assert await ask("GET") == (200, {"replicas": [{"name": "rollout-0"}]})
        status, found = await ask("POST")
        assert (status, found["replica"]) == (202, "rollout-1") and few.reasons == ["asked for over HTTP"]
        status, found = await ask("POST")
        assert (status, found["error"]["code"]) == (409, "replicas_refused")
        status, found = await ask("DELETE", f"{PATH}/rollout-7")
        assert (status, found["error"]["code"], found["error"]["param"]) == (404, "replica_not_found", "name")
        assert (await ask("DELETE", f"{PATH}/rollout-0"))[0] == 202
        few.closed = True
        status, found = await ask("POST")
        assert status == 500 and "was closed" in found["error"]["message"]
    await endpoint.aclose()
    await endpoint.aclose()
    assert not (tmp_path / "admin.json").exists()


async def test_a_server_with_one_engine_says_how_to_have_more() -> None:
    failure = [""]
    app = web.Application(middlewares=[errors])
    app.router.add_routes(replica_routes(OneEngine(lambda: failure[0]), lambda request: None))
    async with TestClient(TestServer(app)) as client:
        assert (await (await client.get(PATH)).json())["replicas"] == [{"name": "engine", "state": "serving"}]
        failure[0] = "no memory"
        assert (await (await client.get(PATH)).json())["replicas"] == [{"name": "engine", "state": "failed"}]
        for answer in (await client.post(PATH), await client.delete(f"{PATH}/engine")):
            assert answer.status == 409 and "rollout.remote.urls" in (await answer.json())["error"]["message"]
        assert (await client.delete(f"{PATH}/other")).status == 404
