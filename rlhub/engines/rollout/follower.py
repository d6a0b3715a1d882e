"""Following a request whose engine runs on an event loop of its own: what it tells there is heard where it was asked."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rlhub.engines.rollout.base import Completion, Follow, Progress


class Follower:
    """Made on the event loop that asks.  What `follow` raises ends the request and is the caller's."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Completion] | None = None
        self._error: Exception | None = None

    def tell(self, progress: Progress) -> None:
        """From the engine's loop."""
        with suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(self._hear, progress)

    def _hear(self, progress: Progress) -> None:
        if self._answer is None:
            return
        try:
            self._follow(progress)
        except Exception as error:  # noqa: BLE001  the caller's own code: `until` raises it
            self._error = error
            self._answer.cancel()

    async def until(self, answer: asyncio.Future[Completion]) -> Completion:
        """Nothing is told before and after."""
        self._answer = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._answer = None
