"""Many small calls of one Ray actor, carried by few large ones.

A call of a Ray actor costs about a millisecond, whatever it carries.  So one call (`collect`) takes along all requests that have
come up, waits in the actor, and brings back all results there are; requests that come up meanwhile travel together in
another (`deliver`).  The reference of `collect` is awaited; when the process dies it fails, and with it all pending calls.
Measured with 200 pending calls that return at once: 1,000 a second with one Ray call each, 7,000 a second this way.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from rlhub.errors import ClusterLostError, DeadlineError
from rlhub.single_controller.invoke import RemoteError
from rlhub.single_controller.ray.watch import Listener, check_cluster, listen
from rlhub.utils import faults

_SETTLE_TURNS = 4
"""Turns of the event loop from an answer until its receiver, through a task runner, has sent its next request: after so many
the answers' successors travel in one Ray call, instead of one each."""

_MAIN = b"__main__"
"""Name of the main script's module in a pickle; other processes have another one."""

CANCEL = b""
"""Instead of a request: end the call of that number."""


Message = tuple[int, bytes]
"""A request (the pickled method, arguments, keywords, the sender's step) or CANCEL, by the number of its call.  Tuples, because
Ray pickles these ten times as fast as dataclasses."""

Reply = tuple[int, bool, bytes]
"""The end of a call, by its number: whether it failed, and its pickled result or RemoteError."""


@dataclass(slots=True)
class _PendingCall:
    method: str
    future: asyncio.Future[Any]


def pack(value: Any) -> bytes:
    """Pickles a value.  What the main script or a function defines goes by value, which only the slower cloudpickle does."""
    try:
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - a user's object may raise anything while it is pickled; cloudpickle then says what
        payload = _MAIN
    return bytes(cloudpickle.dumps(value)) if _MAIN in payload else payload  # type: ignore[no-untyped-call]


class CallChannel(Listener):
    """The pending calls of one event loop in one actor; to be used on that loop only.  A lost cluster ends them.

    explain: the error to raise for what Ray raised, by method name.
    """

    def __init__(self, actor: Any, name: str, key: str, explain: Callable[[BaseException, str], BaseException]) -> None:
        self._actor = actor
        self._name = name
        self._key = key
        self._explain = explain
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._calls: dict[int, _PendingCall] = {}
        self._outbox: list[Message] = []
        self._collector: asyncio.Task[None] | None = None
        self._parked = False  # whether a `collect` waits in the actor
        listen(self)

    def cluster_lost(self, error: ClusterLostError) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.fail, error)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], deadline_s: float | None) -> Any:
        """Sends and awaits one call."""
        check_cluster()
        payload = pack((method, args, kwargs, faults.current_step()))
        number = next(self._numbers)
        call = self._calls[number] = _PendingCall(method, self._loop.create_future())
        self._send((number, payload))
        timer = self._loop.call_later(deadline_s, self._expire, number, deadline_s) if deadline_s is not None else None
        try:
            return await call.future
        except asyncio.CancelledError:
            self._send((number, CANCEL))
            raise
        finally:
            self._calls.pop(number, None)
            if timer is not None:
                timer.cancel()

    def fail(self, error: BaseException) -> None:
        """Ends all pending calls because of what Ray raised."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(self._explain(error, call.method))

    def _expire(self, number: int, deadline_s: float) -> None:
        call = self._calls[number]
        if not call.future.done():
            call.future.set_exception(DeadlineError(f"{self._name}.{call.method}", deadline_s, "the method is cancelled"))
            self._send((number, CANCEL))

    def _send(self, message: Message) -> None:
        self._outbox.append(message)
        if self._collector is None or self._collector.done():
            self._collector = self._loop.create_task(self._collect())
        elif self._parked and len(self._outbox) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends what came up while `collect` waits in the actor; otherwise that will carry it."""
        if self._outbox and self._parked:
            messages, self._outbox = self._outbox, []
            try:
                self._actor.deliver.remote(self._key, messages)
            except Exception as error:  # noqa: BLE001 - whatever ends the exchange ends the calls, which would hang else
                self.fail(error)

    async def _collect(self) -> None:
        while self._calls or self._outbox:
            # Those who were answered leave the table, and ask again a few turns later.
            for _ in range(_SETTLE_TURNS):
                await asyncio.sleep(0)
            messages, self._outbox = self._outbox, []
            try:
                self._parked = True
                replies = await self._actor.collect.remote(self._key, messages)
            except Exception as error:  # noqa: BLE001 - whatever ends the exchange ends the calls, which would hang else
                self.fail(error)
                return
            finally:
                self._parked = False
            for reply in replies:
                self._settle(reply)

    def _settle(self, reply: Reply) -> None:
        number, failed, payload = reply
        call = self._calls.get(number)
        if call is None or call.future.done():
            return
        try:
            value = pickle.loads(payload)
        except Exception as error:  # noqa: BLE001 - the boundary of a process: whatever its classes raise belongs to this call
            call.future.set_exception(self._explain(error, call.method))
            return
        if failed:
            call.future.set_exception(self._explain(value, call.method))
        else:
            call.future.set_result(value)


def pack_reply(number: int, value: Any, failure: RemoteError | None, describe: Callable[[Exception], RemoteError]) -> Reply:
    """Returns the reply of a call.  describe: makes the failure of a result that cannot be pickled."""
    try:
        return number, failure is not None, pack(value if failure is None else failure)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything while it is pickled
        return number, True, pack(describe(error))
