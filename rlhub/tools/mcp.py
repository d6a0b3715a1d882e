"""mcp: the tools of a Model Context Protocol server, through the official client.

It needs the extra: pip install 'rlhub[mcp]'.  The settings say where the server is:

    command, args, env    a program that speaks over its standard input and output; started once, ended with the run
    url                   a server that speaks streamable HTTP
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlhub.errors import LoadError
from rlhub.tools.base import Tool, ToolError, ToolSource
from rlhub.utils.tool_calls import ToolResult, ToolSchema

try:
    from mcp import Client, StdioServerParameters
except ImportError as missing:
    raise LoadError("MCP servers need the official client, mcp 2.3 or newer: pip install 'rlhub[mcp]'") from missing


class McpTool(Tool):
    """A tool of a server.  All episodes share the server's session, and with it the server's state."""

    def __init__(self, server: McpServer, schema: ToolSchema, remote_name: str) -> None:
        self._server, self._schema, self._remote_name = server, schema, remote_name

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        result = await self._server.client.call_tool(self._remote_name, dict(arguments))
        return ToolResult(text=text_of(result.content), failed=bool(result.is_error))


class McpServer(ToolSource):
    """Connects to a server.  only: the names of the tools to offer; all by default.  prefix: is put before the names, for servers
    whose tools have equal names."""

    def __init__(
        self,
        *,
        command: str = "",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        url: str = "",
        only: Sequence[str] = (),
        prefix: str = "",
        start_timeout_s: float = 60.0,
    ) -> None:
        if bool(command) == bool(url):
            raise ToolError("an MCP server needs either a command or a url")
        server: Any = url
        if command:
            server = StdioServerParameters(command=command, args=list(args), env=None if env is None else dict(env))
        self._where = url or command
        self._only, self._prefix, self._start_timeout_s = tuple(only), prefix, start_timeout_s
        self.client = Client(server)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def aopen(self) -> list[Tool]:
        ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run_session(ready))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await ready
        except TimeoutError as error:
            self._task.cancel()
            raise ToolError(f"the MCP server {self._where} was not ready after {self._start_timeout_s:g} s") from error

    async def aclose(self) -> None:
        self._stop.set()
        if self._task is not None:
            task, self._task = self._task, None
            await asyncio.wait([task])

    async def _run_session(self, ready: asyncio.Future[list[Tool]]) -> None:
        """Opens and closes the session in the same task, as the cancel scopes of the client require."""
        try:
            async with self.client:
                ready.set_result(await self._tools())
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001  # boundary to a foreign process: its end must reach the waiting coroutine
            if not ready.done():
                ready.set_exception(ToolError(f"the MCP server {self._where} cannot be used: {_causes(error)}"))

    async def _tools(self) -> list[Tool]:
        described = await self._described()
        missing = [name for name in self._only if name not in described]
        if missing:
            raise ToolError(f"it has no {', '.join(missing)}; it has {', '.join(described) or 'no tools'}")
        return [McpTool(self, schema, name) for name, schema in described.items() if not self._only or name in self._only]

    async def _described(self) -> dict[str, ToolSchema]:
        """Returns name at the server -> schema; a server may list its tools on several pages."""
        found: dict[str, ToolSchema] = {}
        cursor = None
        while True:
            page = await self.client.list_tools(cursor=cursor)
            for tool in page.tools:
                described = {"name": self._prefix + tool.name, "description": tool.description or ""}
                found[tool.name] = {"type": "function", "function": {**described, "parameters": dict(tool.input_schema)}}
            cursor = page.next_cursor
            if not cursor:
                return found


def text_of(content: Sequence[Any]) -> str:
    """Returns the text parts of a result, and for other parts their kind."""
    return "\n".join(part.text if part.type == "text" else f"({part.type})" for part in content)


def _causes(error: BaseException) -> str:
    """Returns the messages of all errors in an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_causes(inner) for inner in error.exceptions)
    return f"{type(error).__name__}: {error}"
