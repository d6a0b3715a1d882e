"""python: runs code that a model writes in a child process (utils/children) or, with `sandbox`, in a sandbox (sandboxes).

A call in a child is a process of its own, forked from one that has loaded only the standard library: calls share no state, and
whatever a call does to its interpreter, or starts, ends with it.  It has no file descriptor but that of its own reply, few
environment variables, and no capabilities, not even root's.  This is no sandbox against malicious code: the code has this user's
access to files (including a token in the home folder) and network, and where PID namespaces are not allowed it sees and can
signal this user's processes.

A call in a sandbox has none of these.  It starts an interpreter, which takes some hundredths of a second more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhub.sandboxes.base import SandboxProvider
from rlhub.sandboxes.registry import load_sandbox
from rlhub.tools import python_program
from rlhub.tools.base import Tool, ToolError
from rlhub.tools.schemas import schema_of
from rlhub.utils.children.access import Access
from rlhub.utils.children.pool import KillablePool
from rlhub.utils.tool_calls import ToolResult, ToolSchema

TARGET = "rlhub.tools.python_child:run_code"
OUT_OF_MEMORY = "the code used too much memory"


def python(code: str) -> str:
    """Run Python code and read what it prints, and the value of its last line.

    code: a whole program; nothing is kept from one call to the next.
    """
    raise NotImplementedError("described here, run in a child")


class _Runner(Protocol):
    async def run(self, code: str) -> dict[str, Any]:
        """Returns the reply of `run_program`.  Raises ToolError where the code was ended."""
        ...

    async def aclose(self) -> None:
        """Ends all processes."""
        ...


class PythonTool(Tool):
    """Runs Python programs.

    num_workers: maximum number of concurrent calls.  timeout_s: time limit of a call in seconds.  memory_gb: address space of a
    call, in GiB. env: environment variables that programs receive besides PATH, HOME, LANG and TMPDIR. sandbox: a registered
    sandbox (bwrap, docker), path/to/file.py:Class, or a mapping with `name` and settings; None: a child process.
    """

    _schema = schema_of(python)

    def __init__(
        self,
        *,
        num_workers: int = 2,
        timeout_s: float = 10.0,
        memory_gb: float = 1.0,
        env: Sequence[str] = (),
        sandbox: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ConfigError for a name in `env` that is not set, and for a sandbox that cannot run here."""
        self._access = Access(setting="settings.env of the tool python", env=tuple(env), untrusted=True)
        self._access.variables()
        self._runner: _Runner
        if sandbox is None:
            self._runner = _Children(num_workers, timeout_s, memory_gb, self._access)
        else:
            limits = {"timeout_s": timeout_s, "memory_gb": memory_gb, "env": list(env)}
            provider = load_sandbox(sandbox, where="settings.sandbox of the tool python", **limits)
            self._runner = _Sandboxed(num_workers, provider)

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        reply = await self._runner.run(arguments["code"])
        text, failed = str(reply["text"]), bool(reply["failed"])
        return ToolResult(text=text + self._access.hint(text) if failed else text, failed=failed)

    async def aclose(self) -> None:
        await self._runner.aclose()


class _Children:
    """Runs each call in a fork of a child; children start when they are needed."""

    def __init__(self, num_workers: int, timeout_s: float, memory_gb: float, access: Access) -> None:
        self._pools = [
            KillablePool(TARGET, ["code"], num_workers=1, timeout_s=timeout_s, memory_gb=memory_gb, access=access)
            for _ in range(num_workers)
        ]
        self._free: asyncio.LifoQueue[KillablePool] | None = None

    async def run(self, code: str) -> dict[str, Any]:
        if self._free is None:
            self._free = asyncio.LifoQueue()
            for pool in self._pools:
                self._free.put_nowait(pool)
        pool = await self._free.get()
        call = asyncio.ensure_future(asyncio.to_thread(pool.map, [{"code": code}]))
        free = self._free
        call.add_done_callback(lambda done: free.put_nowait(pool))  # also when the episode waits no more
        outcome = (await asyncio.shield(call))[0]
        if outcome.failure is None:
            return dict(outcome.value)
        if outcome.failure.kind == "memory":
            raise ToolError(OUT_OF_MEMORY)
        why = outcome.failure.message.partition("\n")[0]
        raise ToolError(f"the code was ended: {why}")

    async def aclose(self) -> None:
        for pool in self._pools:
            await asyncio.to_thread(pool.close)


class _Sandboxed:
    """Runs each call in a sandbox of its own."""

    def __init__(self, num_workers: int, provider: SandboxProvider) -> None:
        self._provider, self._places = provider, asyncio.Semaphore(num_workers)
        self._program = Path(python_program.__file__).read_text(encoding="utf-8")

    async def run(self, code: str) -> dict[str, Any]:
        async with self._places, await self._provider.open() as sandbox:
            command = [self._provider.python, "-I", "-c", self._program]
            found = await sandbox.exec(command, stdin=code.encode(errors="surrogatepass"))
        if found.ended == "memory":
            raise ToolError(OUT_OF_MEMORY)
        if found.ended == "time":
            raise ToolError(f"the code was ended: not done after {self._provider.limits.timeout_s:g} s")
        if found.ended:
            raise ToolError(f"the code was ended: over its limit on {found.ended}")
        return python_program.read_reply(found.stdout)

    async def aclose(self) -> None:
        """Every sandbox ends with its call."""
