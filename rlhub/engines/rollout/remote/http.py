"""JSON over HTTP to a rollout server, whole or in events, with deadlines, and waiting where the server says that it is full."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from rlhub.errors import ConfigError, DeadlineError, EngineError, RequestError
from rlhub.utils import faults

POLL_S = 0.5
AT_FAULT, FULL, UNAVAILABLE = 400, 429, 503
SHOWN = 500  # characters of an error's body in the message
JSON = "application/json"
DATA, LAST_EVENT = b"data:", b"[DONE]"


class BrokenConnectionError(EngineError):
    """The server cannot be reached, or went away while it answered."""


class Http:
    """One server's connections, on one event loop.  url: without the path.  admin_key: of the calls that say so, where it
    differs from `key`. request_s: for one request, waiting for a place or for a server that mends itself included."""

    def __init__(self, url: str, key: str | None, *, request_s: float, admin_key: str | None = None) -> None:
        self.url, self._request_s = url.rstrip("/").removesuffix("/v1"), request_s
        self._headers, self._admin_headers = _bearer(key), _bearer(admin_key or key)
        self._session: aiohttp.ClientSession | None = None

    async def call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST", admin: bool = False) -> Any:
        """Returns the answer's JSON, None where there is none.  Raises EngineError for any status but success, of which
        RequestError for 400; DeadlineError when it is late.  admin: with the administration's key."""
        async with self._answered(path, body, method, admin=admin) as answer:
            text = await answer.text()
            return await answer.json() if answer.content_type == JSON and text else None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Yields the JSON of each event as it comes; an answer that is not streamed is the only one.  Raises as `call`, and
        BrokenConnectionError where the last event does not come."""
        async with self._answered(path, body, "POST") as answer:
            if answer.content_type == JSON:
                yield await answer.json()
                return
            async for data in _events(answer.content):
                if data == LAST_EVENT:
                    return
                yield self._decoded(path, data)
        raise BrokenConnectionError(f"{self.url}{path} ended its answer in the middle; does the server still run?")

    def _decoded(self, path: str, data: bytes) -> Any:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise EngineError(f"{self.url}{path} streams what is not JSON: {data[:SHOWN]!r}") from error
        if isinstance(event, dict) and event.get("error"):
            raise EngineError(f"{self.url}{path} failed in the middle of its answer: {str(event['error'])[:SHOWN]}")
        return event

    @asynccontextmanager
    async def _answered(
        self, path: str, body: dict[str, Any] | None, method: str, *, admin: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Gives an answer of success, to be read inside; a server that says when to come back is asked again then."""
        headers = self._admin_headers if admin else self._headers
        deadline = time.monotonic() + self._request_s
        try:
            while True:
                faults.at("remote.request")
                timeout = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
                request = self._open().request(method, self.url + path, json=body, timeout=timeout, headers=headers)
                async with request as answer:
                    if answer.status < 400:
                        yield answer
                        return
                    retry_after = answer.headers.get("Retry-After")
                    if answer.status != FULL and (answer.status != UNAVAILABLE or retry_after is None or method == "GET"):
                        kind = RequestError if answer.status == AT_FAULT else EngineError
                        raise kind(f"{self.url}{path} answered {answer.status}: {(await answer.text())[:SHOWN]}")
                    wait_s = float(retry_after or "1")
                if time.monotonic() + wait_s > deadline:
                    raise DeadlineError(f"a place at {self.url}{path}", self._request_s, "the server is full: raise its capacity")
                await asyncio.sleep(wait_s)
        except TimeoutError:
            raise DeadlineError(f"an answer of {self.url}{path}", self._request_s) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            message = f"{self.url}{path}: {type(error).__name__}: {error}; does the server still run?"
            raise BrokenConnectionError(message) from error

    async def wait_ready(self, path: str, seconds: float) -> None:
        """Waits until the server answers.  Raises DeadlineError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.call(path, method="GET")
                return
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the rollout server {self.url}", seconds, str(error)) from error
            await asyncio.sleep(POLL_S)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # As many connections as there are requests: the server decides how many it takes.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events, of any length."""
    rest = b""
    async for some in content.iter_any():
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                yield line.removeprefix(DATA).strip()


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def read_key(setting: str, file: str | None) -> str | None:
    """Returns the key in a file that rollout.remote's setting names.  Raises ConfigError if it cannot be read or is empty."""
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"rollout.remote.{setting}: {file} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"rollout.remote.{setting}: {file} is empty")
    return key
