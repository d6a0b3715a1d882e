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

from rlhub.errors import ConfigError, DeadlineError, EngineError
from rlhub.utils import faults

POLL_S = 0.5
FULL = 429
SHOWN = 500  # characters of an error's body in the message
JSON = "application/json"
DATA, LAST_EVENT = b"data:", b"[DONE]"


class BrokenConnectionError(EngineError):
    """The server cannot be reached, or went away while it answered."""


class Http:
    """Lives on one event loop.  url: without the path.  request_s: for one request, waiting for a place included."""

    def __init__(self, url: str, key: str | None, *, request_s: float) -> None:
        self.url, self._request_s = url.rstrip("/").removesuffix("/v1"), request_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        """The answer's JSON, None where there is none.  EngineError for any status but success, DeadlineError when it is late."""
        async with self._answered(path, body, method) as answer:
            text = await answer.text()
            return await answer.json() if answer.content_type == JSON and text else None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of each event as it comes; an answer that is not streamed is the only one.  Raises as `call`, and
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
    async def _answered(self, path: str, body: dict[str, Any] | None, method: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of success, to be read inside; where the server is full it is asked again."""
        deadline = time.monotonic() + self._request_s
        try:
            while True:
                faults.at("remote.request")
                timeout = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
                async with self._open().request(method, self.url + path, json=body, timeout=timeout) as answer:
                    if answer.status < 400:
                        yield answer
                        return
                    if answer.status != FULL:
                        raise EngineError(f"{self.url}{path} answered {answer.status}: {(await answer.text())[:SHOWN]}")
                    wait_s = float(answer.headers.get("Retry-After", "1"))
                if time.monotonic() + wait_s > deadline:
                    raise DeadlineError(f"a place at {self.url}{path}", self._request_s, "the server is full: raise its capacity")
                await asyncio.sleep(wait_s)
        except TimeoutError:
            raise DeadlineError(f"an answer of {self.url}{path}", self._request_s) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            told = f"{self.url}{path}: {type(error).__name__}: {error}; does the server still run?"
            raise BrokenConnectionError(told) from error

    async def wait_ready(self, path: str, seconds: float) -> None:
        """Until the server answers.  DeadlineError after `seconds`."""
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
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Data of server-sent events, of any length."""
    held = b""
    async for some in content.iter_any():
        *lines, held = (held + some).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                yield line.removeprefix(DATA).strip()


def read_key(file: str | None) -> str | None:
    """The key in a file.  ConfigError if it cannot be read or is empty."""
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"rollout.remote.api_key_file: {file} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"rollout.remote.api_key_file: {file} is empty")
    return key
