"""From names and settings to tools: registered ones, Tool classes, and typed functions, which FunctionTool makes tools of.

tools:
  - calculator                          # a registered name
  - name: python
    settings: {timeout_s: 5}
  - name: my_package.lookup:search      # or path/to/file.py:search: a typed function, or a Tool class
    settings: {index: /data/index}      # keywords that the model does not see
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhub.errors import ConfigError, RlhubError
from rlhub.tools.base import Tool, ToolSource
from rlhub.tools.registry import TOOLS
from rlhub.tools.schemas import schema_of
from rlhub.utils.tool_calls import ToolResult, ToolSchema, as_result
from rlhub.utils.user_code import load_target


def read_tool_file(path: str | Path) -> list[Any]:
    """Returns the entries of a YAML file.  ConfigError if it has none."""
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"tool_config_path={path}: {error}") from error
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"tool_config_path={path}: expected a list under 'tools', got {entries!r:.80}")
    return entries


def load_tools(entries: Sequence[Any], *, where: str) -> list[Tool | ToolSource]:
    """Returns the tools of these entries.  ConfigError lists every one that cannot be made.  where: their setting."""
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

    Coroutine functions are awaited; plain ones run in a thread, which a deadline leaves behind but cannot end: what may hang
    or is not trusted belongs into a process of its own (as in python.py).
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
