"""A typed Python function as a tool."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlhub.tools.base import Tool
from rlhub.tools.schemas import schema_of
from rlhub.utils.tool_calls import ToolResult, ToolSchema, as_result


class FunctionTool(Tool):
    """Calls `function` with the model's arguments and the `bound` ones, which the model does not see.  It returns text, a tuple
    (text, reward, metrics), a ToolResult, or what is shown as JSON.

    Coroutine functions are awaited; plain ones run in a thread, which a deadline leaves behind but cannot end: what may hang
    or is not trusted belongs into a process of its own (see python.py).
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
