"""One simulator in a process of its own, as coroutines: every call has a deadline, after which the process is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rlhub.envs.base import EnvDiedError, EnvError
from rlhub.errors import DeadlineError, LoadError
from rlhub.utils import faults
from rlhub.utils.killable_process import ChildProcess, spawn
from rlhub.utils.killable_wire import WireError, encode

SERVE = "rlhub.envs.child:serve"
START_TIMEOUT_S = 120.0  # imports of a large simulator on a busy machine


class EnvProcess:
    """Belongs to one event loop; one call at a time.  After an error other than EnvError it is `dead` and killed."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self.dead = False

    @classmethod
    async def start(
        cls, target: str, settings: Mapping[str, Any], *, timeout_s: float, memory_gb: float, serve: str = SERVE
    ) -> EnvProcess:
        """A process with the simulator made in it.  timeout_s: the longest that a call may take, ever.  serve: what answers the
        calls there.  LoadError."""
        parameters = ("operation", "arguments")
        spawning = asyncio.ensure_future(asyncio.to_thread(spawn, serve, parameters, timeout_s=timeout_s, memory_gb=memory_gb))
        try:
            process = cls(await asyncio.shield(spawning))
        except asyncio.CancelledError:
            spawning.add_done_callback(_end_unwanted)
            raise
        reply = await process._exchange("start", None, START_TIMEOUT_S)
        if "load_error" in reply:
            await process.kill()
            raise LoadError(f"environment {target}:\n{reply['load_error']}")
        try:
            await process.call("make", {"target": target, "settings": dict(settings)}, START_TIMEOUT_S)
        except EnvError as error:
            await process.kill()
            raise LoadError(f"environment {target} cannot be made: {error}") from error
        return process

    async def call(self, operation: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """The result of an operation.  EnvError: it raised; EnvDiedError; DeadlineError."""
        if self.dead:
            raise EnvDiedError("the environment's process has ended; take another one from the pool")
        try:
            line = encode([{"operation": operation, "arguments": dict(arguments)}])
        except WireError as error:
            raise EnvError(f"the arguments of {operation} have no JSON form: {error}") from error
        faults.at("environment.call", pid=self._child.process.pid)
        reply = await self._exchange(operation, line, timeout_s)
        if reply.get("failed") == "memory":
            how = await self.kill()
            raise EnvDiedError(f"{operation}: the environment used more memory than it may ({how})")
        if "failed" in reply:
            raise EnvError(f"{operation}: {reply['message']}")
        return reply.get("value")

    async def kill(self) -> str:
        """End the process with all it has started; says how it ended.  Idempotent."""
        if self.dead:
            return "ended before"
        self.dead = True
        return await asyncio.to_thread(self._child.kill)

    async def _exchange(self, operation: str, line: bytes | None, timeout_s: float) -> dict[str, Any]:
        """Send a line and wait for the reply to it; whatever else happens costs the process its life."""
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._reply(line)
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

    async def _reply(self, line: bytes | None) -> dict[str, Any] | None:
        """The next reply; None at the end of the stream."""
        loop, child = asyncio.get_running_loop(), self._child
        replies: asyncio.Future[dict[str, Any] | None] = loop.create_future()

        def readable() -> None:
            found = child.read()
            if not replies.done() and (found or child.finished):
                replies.set_result(found[0] if found else None)

        def writable() -> None:
            child.write()
            if not child.wants_write:
                loop.remove_writer(child.request_fd)

        loop.add_reader(child.reply_fd, readable)
        try:
            if line is not None:
                child.give((), line)
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
