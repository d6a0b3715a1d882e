"""Repeated requests: a call of a client has one answer and one record in its session, however often the client sends it.

A client sends a request again if its connection broke before it had the answer.  The repetition is known by its Idempotency-Key;
without one, by the number of the attempt that the clients of OpenAI and Anthropic send, and by its body.  It gets the answer that
was recorded, joins the generation that still runs, or starts again with the same seed one that was cancelled.  Requests without
either sign are samples of their own, even if their bodies are equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlhub.agents.openai_server.answers import ID_BYTES, Answer
from rlhub.agents.openai_server.errors import ApiError
from rlhub.agents.openai_server.streaming import RunningAnswer

KEY = "Idempotency-Key"
ATTEMPT = "X-Stainless-Retry-Count"
"""The header with the number of repetitions before a request, from 0, which clients that are built with Stainless send."""
FAILED, CUT, RUNNING, RECEIVED = range(4)


@dataclass(slots=True, kw_only=True, eq=False)
class ClientCall:
    """A call of a client, with all the requests that repeat it.

    digest: of the path and the body.  attempt: the number of its last request, from 0.  number: of the call in its session, from
    0; -1 before it is counted.  request_id: the part after the prefix of the response's id.  running: the answers while they are
    sampled.
    """

    digest: bytes = b""
    key: str = ""
    attempt: int = 0
    number: int = -1
    request_id: str = field(default_factory=lambda: secrets.token_hex(ID_BYTES))
    created: int = field(default_factory=lambda: int(time.time()))
    running: RunningAnswer = field(default_factory=RunningAnswer)
    _transport: asyncio.BaseTransport | None = None
    _task: asyncio.Task[list[Answer]] | None = None
    _num_readers: int = 0

    @contextmanager
    def joined(
        self, transport: asyncio.BaseTransport | None, begin: Callable[[], Coroutine[Any, Any, list[Answer]]]
    ) -> Iterator[tuple[asyncio.Future[list[Answer]], RunningAnswer]]:
        """Yields the answers, and a view of them while they are sampled.  begin: samples them if no earlier request did.

        The end of the last request that waits for them cancels a generation.  transport: the request's connection.
        """
        reader, self._transport = self.running.view(), transport
        if self._task is None or self.state == FAILED:
            self.running = reader = RunningAnswer()
            self._task = asyncio.ensure_future(begin())
        self._num_readers += 1
        try:
            yield asyncio.shield(self._task), reader
        finally:
            self._num_readers -= 1
            if not self._num_readers and self._task is not None and not self._task.done():
                self._task.cancel()
                self._task = None

    @property
    def state(self) -> int:
        """Returns what became of the last request, as far as this side knows: the lower, the likelier its client asks again."""
        if self._task is None or (self._task.done() and (self._task.cancelled() or self._task.exception())):
            return FAILED
        if self._transport is None or self._transport.is_closing():
            return CUT
        return RECEIVED if self._task.done() else RUNNING


@dataclass(slots=True)
class ClientCalls:
    """The calls of one session, in their order."""

    _calls: list[ClientCall] = field(default_factory=list)

    def of(self, path: str, headers: Mapping[str, str], body: bytes, continued: Collection[str]) -> ClientCall:
        """Returns the call to which a request belongs, which is a new one unless it repeats another.

        continued: the ids of responses to which the agent has replied; it has received these.  Raises ApiError if the request's
        key was sent with another body.
        """
        digest, key = hashlib.sha256(path.encode() + b"\0" + body).digest(), headers.get(KEY, "")
        told = headers.get(ATTEMPT, "")
        attempt = int(told) if told.isdecimal() else 0
        found = self._of_key(key, digest) if key else self._repeated(digest, attempt, continued)
        if found is None:
            found = ClientCall(digest=digest, key=key)
            self._calls.append(found)
        found.attempt = attempt
        return found

    def _of_key(self, key: str, digest: bytes) -> ClientCall | None:
        found = next((call for call in self._calls if call.key == key), None)
        if found is not None and found.digest != digest:
            message = f"{KEY}: {key!r:.100} was sent with another body in this session: choose a new key for each call"
            raise ApiError(message, param=KEY, code="idempotency_key_reused")
        return found

    def _repeated(self, digest: bytes, attempt: int, continued: Collection[str]) -> ClientCall | None:
        """Returns the call of which this is attempt number `attempt`: of several the one that has most likely failed, then the
        newest.  Attempts before it need not have come here.  An answer that was sent whole over a connection that is still open
        was received."""
        if not attempt:
            return None
        asked = [call for call in self._calls if not call.key and call.digest == digest and call.attempt < attempt]
        lost = [call for call in reversed(asked) if call.state != RECEIVED and call.request_id not in continued]
        return min(lost, key=lambda call: call.state, default=None)
