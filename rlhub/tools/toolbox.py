"""The tools of a run: how they are built from settings, Toolbox, which all episodes share, and ToolSession, one episode's use of
it.

An entry names a registered tool, a Tool class, or a typed function, of which FunctionTool makes a tool:

    tools:
      - calculator                          # a registered name
      - name: python
        settings: {timeout_s: 5}
      - name: my_package.lookup:search      # or path/to/file.py:search: a typed function, or a Tool class
        settings: {index: /data/index}      # keyword arguments that the model does not see

An error of a tool or of a call never ends an episode: an unknown name, wrong arguments, an exception or a passed deadline becomes
text that the model reads, and is counted.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhub.errors import ConfigError, RlhubError
from rlhub.registry import suggest
from rlhub.tools.base import Tool, ToolError, ToolSource
from rlhub.tools.registry import TOOLS
from rlhub.tools.schemas import checked_arguments, schema_of
from rlhub.utils.tool_calls import ToolCall, ToolResult, ToolSchema, as_result, schema_name
from rlhub.utils.user_code import load_target

logger = logging.getLogger(__name__)


class Toolbox:
    """Holds the tools of a run.  It belongs to one event loop, and `aopen` must come before `session`."""

    def __init__(self, tools: Sequence[Tool | ToolSource], *, timeout_s: float) -> None:
        """Takes the tools and sources.  timeout_s: time limit in seconds of a call, and of creating an instance."""
        self.timeout_s = timeout_s
        self._given = list(tools)
        self._opening: asyncio.Task[None] | None = None
        self._tools: dict[str, Tool] = {}

    async def aopen(self) -> None:
        """Starts the sources.  Idempotent, also for concurrent calls.  Raises ToolError if two tools have the same name."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        for given in self._given:
            for tool in [given] if isinstance(given, Tool) else await given.aopen():
                name = schema_name(tool.schema)
                if name in self._tools:
                    raise ToolError(f"two tools are called {name!r}; the model could not tell them apart")
                self._tools[name] = tool

    @property
    def schemas(self) -> list[ToolSchema]:
        """Returns the schemas of all tools."""
        return [tool.schema for tool in self._tools.values()]

    def session(self, instance: str, row: Mapping[str, Any]) -> ToolSession:
        """Returns the session of the episode `instance` on the prompt `row`."""
        return ToolSession(self._tools, instance, row, self.timeout_s)

    async def aclose(self) -> None:
        """Closes all tools and sources.  Idempotent."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
        given, self._given, self._tools = self._given, [], {}
        for item in given:
            await item.aclose()


class ToolSession:
    """One episode's use of the tools, as an async context: an instance is created at its first call and released at the end."""

    def __init__(self, tools: Mapping[str, Tool], instance: str, row: Mapping[str, Any], timeout_s: float) -> None:
        self._tools, self._instance, self._row, self._timeout_s = tools, instance, row, timeout_s
        self._created: dict[str, asyncio.Lock] = {}
        self._ready: set[str] = set()

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(self, *error: object) -> None:
        for name in self._ready:
            await self._release(name)

    @property
    def schemas(self) -> list[ToolSchema]:
        """Returns the schemas of all tools."""
        return [tool.schema for tool in self._tools.values()]

    async def execute(self, call: ToolCall) -> ToolResult:
        """Executes a call and returns its result, or its error as text.  Raises nothing but cancellation."""
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return _failure(f"there is no tool {call.name!r:.80}{suggest(call.name, self._tools) or ';'} known: {known}")
        try:
            arguments = checked_arguments(tool.schema, call.arguments)
            async with asyncio.timeout(self._timeout_s):
                await self._create(call.name, tool)
                return as_result(await tool.execute(self._instance, arguments))
        except ToolError as error:
            return _failure(str(error))
        except TimeoutError:
            return _failure(f"{call.name} was not done after {self._timeout_s:g} s")
        except Exception as error:  # boundary to the user's code: the model reads its error
            logger.debug("tool %s raised", call.name, exc_info=True)
            return _failure(f"{type(error).__name__}: {error}")

    async def _create(self, name: str, tool: Tool) -> None:
        async with self._created.setdefault(name, asyncio.Lock()):
            if name not in self._ready:
                await tool.create(self._instance, self._row)
                self._ready.add(name)

    async def _release(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._tools[name].release(self._instance)
        except Exception:  # boundary to the user's code: the episode itself is done
            logger.warning("tool %s could not release the instance of episode %s", name, self._instance, exc_info=True)


def _failure(message: str) -> ToolResult:
    return ToolResult(text=f"Error: {message}", failed=True)


def read_tool_file(path: str | Path) -> list[Any]:
    """Returns the entries of a YAML file.  Raises ConfigError if it has none."""
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"tool_config_path={path}: {error}") from error
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"tool_config_path={path}: expected a list under 'tools', got {entries!r:.80}")
    return entries


def load_tools(entries: Sequence[Any], *, where: str) -> list[Tool | ToolSource]:
    """Builds the tools of these entries.  Raises ConfigError that lists every entry which cannot be built.  where: the setting's
    name."""
    tools, problems = [], []
    for number, entry in enumerate(entries):
        try:
            tools.append(_load(entry))
        except (RlhubError, TypeError, ValueError) as error:
            problems.append(f"{where}, entry {number} ({entry!r:.80}): {error}")
    if problems:
        raise ConfigError(problems)
    return tools


def _load(entry: Any) -> Tool | ToolSource:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or entry.keys() - {"name", "settings"}:
        raise ValueError("expected a name, or a mapping with 'name' and 'settings'")
    name, settings = entry["name"], dict(entry.get("settings") or {})
    target = load_target(name) if ":" in name else TOOLS.get(name)
    if not callable(target):
        raise ValueError(f"{name} is a {type(target).__name__}; expected a typed function or a Tool class")
    if isinstance(target, type) and issubclass(target, Tool | ToolSource):
        return target(**settings)
    return FunctionTool(target, bound=settings)


class FunctionTool(Tool):
    """Calls `function` with the model's arguments and the `bound` ones, which the model does not see.  The function returns text,
    a tuple (text, reward, metrics), a ToolResult, or a value that is shown as JSON.

    Coroutine functions are awaited.  Plain functions run in a thread, which a deadline abandons but cannot end: code that may
    hang or is not trusted belongs into a process of its own (as in python.py).
    """

    def __init__(self, function: Callable[..., Any], *, name: str = "", bound: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._bound = dict(bound or {})
        self._schema = schema_of(function, name=name, hidden=self._bound)
        self._is_async = inspect.iscoroutinefunction(function)

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        keywords = {**arguments, **self._bound}
        value = await (self._function(**keywords) if self._is_async else asyncio.to_thread(self._function, **keywords))
        return as_result(value)
