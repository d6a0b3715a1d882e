"""python: runs code that a model writes in a child process (utils/children), with a deadline and a memory limit.

Each call is a process of its own, forked from a child that has loaded only the standard library: calls share no state, and
whatever a call does to its interpreter, or starts, ends with it.  It has no file descriptor but that of its own reply, few
environment variables, and no capabilities, not even root's.  This is no sandbox against malicious code: the code has this user's
access to files (including a token in the home folder) and network, and where PID namespaces are not allowed it sees and can
signal this user's processes.  Run agents that must not do so in a container.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlhub.tools.base import Tool, ToolError
from rlhub.tools.schemas import schema_of
from rlhub.utils.children.access import Access
from rlhub.utils.children.pool import KillablePool
from rlhub.utils.tool_calls import ToolResult, ToolSchema

TARGET = "rlhub.tools.python_child:run_code"


def python(code: str) -> str:
    """Run Python code and read what it prints, and the value of its last line.

    code: a whole program; nothing is kept from one call to the next.
    """
    raise NotImplementedError("described here, run in a child")


class PythonTool(Tool):
    """Runs Python programs.

    num_workers: maximum number of concurrent calls.  timeout_s: time limit of a call in seconds.  memory_gb: address space of a
    call, in GiB. env: environment variables that programs receive besides PATH, HOME, LANG and TMPDIR. Children start when they
    are needed.
    """

    _schema = schema_of(python)

    def __init__(self, *, num_workers: int = 2, timeout_s: float = 10.0, memory_gb: float = 1.0, env: Sequence[str] = ()) -> None:
        """Raises ConfigError for a name in `env` that is not set."""
        self._access = Access(setting="settings.env of the tool python", env=tuple(env), untrusted=True)
        self._access.variables()
        self._pools = [
            KillablePool(TARGET, ["code"], num_workers=1, timeout_s=timeout_s, memory_gb=memory_gb, access=self._access)
            for _ in range(num_workers)
        ]
        self._free: asyncio.LifoQueue[KillablePool] | None = None

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        if self._free is None:
            self._free = asyncio.LifoQueue()
            for pool in self._pools:
                self._free.put_nowait(pool)
        pool = await self._free.get()
        call = asyncio.ensure_future(asyncio.to_thread(pool.map, [{"code": arguments["code"]}]))
        free = self._free
        call.add_done_callback(lambda done: free.put_nowait(pool))  # also when the episode waits no more
        outcome = (await asyncio.shield(call))[0]
        if outcome.failure is None:
            text, failed = outcome.value["text"], outcome.value["failed"]
            return ToolResult(text=text + self._access.hint(text) if failed else text, failed=failed)
        if outcome.failure.kind == "memory":
            raise ToolError("the code used too much memory")
        why = outcome.failure.message.partition("\n")[0]
        raise ToolError(f"the code was ended: {why}")

    async def aclose(self) -> None:
        for pool in self._pools:
            await asyncio.to_thread(pool.close)
