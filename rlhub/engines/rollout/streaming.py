"""Streaming the tokens of a request from the event loop of its engine to the event loop of the caller."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rlhub.engines.rollout.base import Completion, Follow, Progress


class ProgressRelay:
    """Passes tokens to `follow` on the event loop where it is built.  An error of `follow` ends the request, and `until`
    raises it."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Completion] | None = None
        self._error: Exception | None = None

    def send(self, progress: Progress) -> None:
        """Sends new tokens; called on the engine's event loop."""
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
        """Waits for the completion.  Tokens are passed on only during this wait."""
        self._answer = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._answer = None
