"""Streaming the tokens of a request whose engine runs on an event loop of its own to the event loop that asked."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rlhub.engines.rollout.base import Completion, Follow, Progress


class ProgressRelay:
    """Built on the event loop that asks.  What `follow` raises ends the request and is raised by `until`."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Completion] | None = None
        self._error: Exception | None = None

    def send(self, progress: Progress) -> None:
        """Takes new tokens on the engine's event loop."""
        with suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(self._receive, progress)

    def _receive(self, progress: Progress) -> None:
        if self._answer is None:
            return
        try:
            self._follow(progress)
        except Exception as error:  # noqa: BLE001  the caller's own code: `until` raises it
            self._error = error
            self._answer.cancel()

    async def until(self, answer: asyncio.Future[Completion]) -> Completion:
        """Waits for the completion; before and after, nothing is passed on."""
        self._answer = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._answer = None
