"""`AsyncActorHost`: the asyncio Ray actor in whose process the object of an AsyncActor lives.

Everything, the object's construction included, runs on the actor's event loop, which is not in the process's main thread.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import defaultdict

from rlhub.single_controller.hosted import HostedObject
from rlhub.single_controller.invoke import RemoteError, describe_failure
from rlhub.single_controller.ray.exchange import CANCEL, Message, Reply, pack_reply
from rlhub.single_controller.ray.process import HostIdentity, HostSetup, own_identity, prepare_process
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext
from rlhub.utils import faults

_COPIES: dict[str | None, int] = {None: 1, "lost": 0, "duplicate": 2}
"""How often a reply is sent, by the fault that strikes it."""


class _Replies:
    """What one caller's event loop has not fetched yet."""

    def __init__(self) -> None:
        self.waiting: list[Reply] = []
        self.filled = asyncio.Event()

    def add(self, reply: Reply) -> None:
        self.waiting.append(reply)
        self.filled.set()

    def take(self) -> list[Reply]:
        taken, self.waiting = self.waiting, []
        self.filled.clear()
        return taken


class AsyncActorHost:
    """See the module docstring."""

    def __init__(self, max_concurrency: int) -> None:
        self._max_concurrency = max_concurrency
        self._context = WorkerContext()
        self._replies: defaultdict[str, _Replies] = defaultdict(_Replies)
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def identity(self) -> HostIdentity:
        """Where this process is."""
        return own_identity()

    async def prepare(self, setup: HostSetup) -> None:
        """Take the environment, log file and import path, and import the plugins."""
        self._context = setup.context
        prepare_process(setup)

    async def build(self, spec: ClassWithInitArgs) -> None:
        """Construct the object."""
        self._object = HostedObject(self._max_concurrency)
        await self._object.build(spec, self._context)

    async def linger(self) -> None:
        """Never returns: it fails when the process dies, which tells whoever waits."""
        await asyncio.Event().wait()

    async def deliver(self, key: str, messages: list[Message]) -> None:
        """Start these calls, or end them; returns at once."""
        for number, payload in messages:
            place = (key, number)
            if payload != CANCEL:
                self._running[place] = asyncio.create_task(self._run(place, payload))
            elif place in self._running:
                self._running[place].cancel()

    async def collect(self, key: str, messages: list[Message]) -> list[Reply]:
        """`deliver`, then all replies that are there; waits for the first."""
        await self.deliver(key, messages)
        replies = self._replies[key]
        await replies.filled.wait()
        return replies.take()

    async def _run(self, place: tuple[str, int], payload: bytes) -> None:
        key, number = place
        method = "request"
        value, failure = None, None
        try:
            method, args, kwargs, step = pickle.loads(payload)
            faults.begin_step(step)
            value = await self._object.run(method, args, kwargs)
        except RemoteError as error:
            failure = error
        except asyncio.CancelledError:
            failure = self._object.cancelled_itself(method)
        except Exception as error:  # noqa: BLE001 - the boundary of a process: it is raised at the caller's
            failure = describe_failure(error, self._context, method)
        finally:
            del self._running[place]
        reply = pack_reply(number, value, failure, lambda error: describe_failure(error, self._context, method))
        for _ in range(_COPIES[faults.at("replica.reply")]):
            self._replies[key].add(reply)
