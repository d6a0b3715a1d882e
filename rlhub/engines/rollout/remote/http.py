"""JSON over HTTP to a rollout server, with deadlines, and waiting where the server says that it is full."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp

from rlhub.errors import ConfigError, DeadlineError, EngineError

POLL_S = 0.5
FULL = 429
SHOWN = 500  # characters of an error's body in the message


class Http:
    """Lives on one event loop.  url: without the path.  request_s: for one request, waiting for a place included."""

    def __init__(self, url: str, key: str | None, *, request_s: float) -> None:
        self.url, self._request_s = url.rstrip("/").removesuffix("/v1"), request_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        """The answer's JSON, None where there is none.  EngineError for any status but success, DeadlineError when it is late."""
        deadline = time.monotonic() + self._request_s
        while True:
            wait = await self._once(path, body, method, deadline)
            if not isinstance(wait, _Full):
                return wait
            if time.monotonic() + wait.seconds > deadline:
                raise DeadlineError(f"a place at {self.url}{path}", self._request_s, "the server is full: raise its capacity")
            await asyncio.sleep(wait.seconds)

    async def _once(self, path: str, body: dict[str, Any] | None, method: str, deadline: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
        try:
            async with self._open().request(method, self.url + path, json=body, timeout=timeout) as answer:
                text = await answer.text()
                if answer.status == FULL:
                    return _Full(float(answer.headers.get("Retry-After", "1")))
                if answer.status >= 400:
                    raise EngineError(f"{self.url}{path} answered {answer.status}: {text[:SHOWN]}")
                return await answer.json() if answer.content_type == "application/json" and text else None
        except TimeoutError:
            raise DeadlineError(f"an answer of {self.url}{path}", self._request_s) from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}; does the server still run?") from error

    async def wait_ready(self, path: str, seconds: float) -> None:
        """Until the server answers.  DeadlineError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return await self.call(path, method="GET")
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


class _Full:
    """The server has no place; seconds after which to ask again."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


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
