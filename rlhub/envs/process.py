"""EnvironmentProcess: an environment in a killable process of its own, with coroutines for its calls.

Pools of environments for episodes (source.py) and managers of environments in lock-step (vector/manager.py) consist of these.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from rlhub.envs.base import EnvDiedError, EnvError, EnvironmentLimits
from rlhub.envs.child import decoded
from rlhub.errors import ConfigError, DeadlineError, LoadError
from rlhub.utils import faults
from rlhub.utils.children.access import Access
from rlhub.utils.children.launch import Launch
from rlhub.utils.children.process import LOAD_TIMEOUT_S, ChildProcess, ChildRequest, spawn
from rlhub.utils.children.wire import WireError

SERVE = "rlhub.envs.child:serve"
PARAMETERS = ("operation", "arguments")


class EnvironmentProcess:
    """An environment in a process of its own, with one call at a time.  Any error other than EnvError ends the process, which is
    `dead` then.  made: the answer to the operation "make"."""

    def __init__(self, child: ChildProcess, limits: EnvironmentLimits, access: Access) -> None:
        self._child, self._limits, self._access = child, limits, access
        self.dead = False
        self.made: Any = None

    @classmethod
    async def start(
        cls, making: Mapping[str, Any], limits: EnvironmentLimits, access: Access, launch: Launch | None = None
    ) -> EnvironmentProcess:
        """Starts a process and builds the environment in it.  making: the arguments of the operation "make" in child.py.  Raises
        LoadError."""
        target, memory_gb = making["target"], limits.memory_gb
        spawning = asyncio.ensure_future(
            asyncio.to_thread(spawn, SERVE, PARAMETERS, memory_gb=memory_gb, access=access, launch=launch)
        )
        try:
            process = cls(await asyncio.shield(spawning), limits, access)
        except asyncio.CancelledError:
            spawning.add_done_callback(_kill_spawned)
            raise
        except ConfigError as error:
            raise LoadError(f"environment {target}: {error}") from error
        reply = await process._exchange("start", None, LOAD_TIMEOUT_S)
        if "load_error" in reply:
            await process.kill()
            raise LoadError(f"environment {target}:\n{reply['load_error']}{access.hint(reply['load_error'])}")
        try:
            process.made = await process.request("make", making, LOAD_TIMEOUT_S)
        except EnvError as error:
            await process.kill()
            raise LoadError(f"environment {target} cannot be made: {error}") from error
        return process

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of the environment, within its time limit.

        Raises EnvError if the environment raised an error, EnvDiedError if the process ended, and DeadlineError.
        """
        return decoded(method, await self.request(method, arguments, self._limits.timeout_s(method)))

    async def kill(self) -> str:
        """Ends the process with everything that it has started; returns how it ended.  Idempotent."""
        if self.dead:
            return "ended before"
        self.dead = True
        return await asyncio.to_thread(self._child.kill)

    def kill_now(self) -> None:
        """Does the same as `kill` without an event loop, at the end of an interpreter for example."""
        if not self.dead:
            self.dead = True
            self._child.kill()

    def host_pid(self) -> int:
        """Returns the process's number outside of its namespace."""
        return self._child.host_pid()

    async def request(self, operation: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Executes an operation of child.py; errors as in `call`."""
        if self.dead:
            raise EnvDiedError("the environment's process has ended; take another one from the pool")
        try:
            request = ChildRequest.of([{"operation": operation, "arguments": dict(arguments)}])
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

    async def _exchange(self, operation: str, request: ChildRequest | None, timeout_s: float) -> dict[str, Any]:
        """Sends a request and waits for its reply.  If that fails in any way, the process is killed."""
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

    async def _reply(self, request: ChildRequest | None, timeout_s: float, limit: asyncio.Timeout) -> dict[str, Any] | None:
        """Returns the next reply, or None at the end of the stream.  The time limit is extended while the call imports
        modules."""
        loop, child = asyncio.get_running_loop(), self._child
        replies: asyncio.Future[dict[str, Any] | None] = loop.create_future()

        def readable() -> None:
            received = child.read()
            if replies.done():
                return
            if received or child.finished:
                replies.set_result(received[0] if received else None)
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


def _kill_spawned(spawning: asyncio.Future[ChildProcess]) -> None:
    """Ends a process whose start was cancelled before it was complete."""
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().kill()
