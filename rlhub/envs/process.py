"""One simulator in a process of its own, as coroutines: every call has a deadline, after which the process is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from rlhub.envs.base import EnvDiedError, EnvError
from rlhub.errors import ConfigError, DeadlineError, LoadError
from rlhub.utils import faults
from rlhub.utils.children.access import Access
from rlhub.utils.children.process import LOAD_TIMEOUT_S, ChildProcess, Request, spawn
from rlhub.utils.children.wire import WireError

SERVE = "rlhub.envs.child:serve"


class EnvProcess:
    """Belongs to one event loop; one call at a time.  After an error other than EnvError it is `dead` and killed."""

    def __init__(self, child: ChildProcess, access: Access) -> None:
        self._child, self._access = child, access
        self.dead = False

    @classmethod
    async def start(
        cls, target: str, settings: Mapping[str, Any], *, memory_gb: float, access: Access, serve: str = SERVE
    ) -> EnvProcess:
        """A process with the simulator made in it.  serve: what answers the calls there.  LoadError."""
        parameters = ("operation", "arguments")
        spawning = asyncio.ensure_future(asyncio.to_thread(spawn, serve, parameters, memory_gb=memory_gb, access=access))
        try:
            process = cls(await asyncio.shield(spawning), access)
        except asyncio.CancelledError:
            spawning.add_done_callback(_end_unwanted)
            raise
        except ConfigError as error:
            raise LoadError(f"environment {target}: {error}") from error
        reply = await process._exchange("start", None, LOAD_TIMEOUT_S)
        if "load_error" in reply:
            await process.kill()
            raise LoadError(f"environment {target}:\n{reply['load_error']}{access.hint(reply['load_error'])}")
        try:
            await process.call("make", {"target": target, "settings": dict(settings)}, LOAD_TIMEOUT_S)
        except EnvError as error:
            await process.kill()
            raise LoadError(f"environment {target} cannot be made: {error}") from error
        return process

    async def call(self, operation: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """The result of an operation.  EnvError: it raised; EnvDiedError; DeadlineError."""
        if self.dead:
            raise EnvDiedError("the environment's process has ended; take another one from the pool")
        try:
            request = Request.of([{"operation": operation, "arguments": dict(arguments)}])
        except WireError as error:
            raise EnvError(f"the arguments of {operation} have no JSON form: {error}") from error
        faults.at("environment.call", pid=self._child.host_pid)
        reply = await self._exchange(operation, request, timeout_s)
        if reply.get("failed") == "memory":
            how = await self.kill()
            raise EnvDiedError(f"{operation}: the environment used more memory than it may ({how})")
        if "failed" in reply:
            raise EnvError(f"{operation}: {reply['message']}{self._access.hint(reply['message'])}")
        return reply.get("value")

    async def kill(self) -> str:
        """End the process with all it has started; says how it ended.  Idempotent."""
        if self.dead:
            return "ended before"
        self.dead = True
        return await asyncio.to_thread(self._child.kill)

    async def _exchange(self, operation: str, request: Request | None, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for the reply to it; whatever else happens costs the process its life."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                reply = await self._reply(request, timeout_s, limit)
        except TimeoutError as error:
            await self.kill()
            raise DeadlineError(f"environment {operation}", timeout_s, "its process was killed") from error
        except asyncio.CancelledError:
            await asyncio.shield(self.kill())  # the reply would be taken for that of the next call
            raise
        if reply is None:
            how = await self.kill()
            raise EnvDiedError(f"{operation}: the environment's process {how}")
        return reply

    async def _reply(self, request: Request | None, timeout_s: float, limit: asyncio.Timeout) -> dict[str, Any] | None:
        """The next reply; None at the end of the stream.  The limit is put off while the call imports."""
        loop, child = asyncio.get_running_loop(), self._child
        replies: asyncio.Future[dict[str, Any] | None] = loop.create_future()

        def readable() -> None:
            found = child.read()
            if replies.done():
                return
            if found or child.finished:
                replies.set_result(found[0] if found else None)
            elif not limit.expired():
                limit.reschedule(loop.time() + child.deadline(timeout_s) - time.monotonic())

        def writable() -> None:
            child.write()
            if not child.wants_write:
                loop.remove_writer(child.request_fd)

        loop.add_reader(child.reply_fd, readable)
        try:
            if request is not None:
                child.give((), request)
                if child.wants_write:
                    loop.add_writer(child.request_fd, writable)
            return await replies
        finally:
            loop.remove_reader(child.reply_fd)
            loop.remove_writer(child.request_fd)


def _end_unwanted(spawning: asyncio.Future[ChildProcess]) -> None:
    """A process whose user left before it was there."""
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().kill()
