"""The registries of the tools and call formats that come with rlhub.  Importing this module loads none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhub.registry import Registry

if TYPE_CHECKING:
    from rlhub.tools.base import Tool, ToolSource
    from rlhub.tools.formats import ParsedReply

TOOLS: Registry[Callable[..., Tool | ToolSource]] = Registry("tool")
"""Name -> the class or function that builds the tool from its settings, passed as keyword arguments."""
TOOLS.add_lazy("calculator", "rlhub.tools.calculator:CalculatorTool")
TOOLS.add_lazy("python", "rlhub.tools.python:PythonTool")
TOOLS.add_lazy("mcp", "rlhub.tools.mcp:McpServer")

TOOL_FORMATS: Registry[Callable[[str], ParsedReply]] = Registry("tool format")
"""Name -> `parse(text)`, which parses the calls in a model's reply."""
TOOL_FORMATS.add_lazy("hermes", "rlhub.tools.formats:parse_hermes")
TOOL_FORMATS.add_lazy("json", "rlhub.tools.formats:parse_json")
