"""The tools that an answer may call, must call, and how many: `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhub.agents.openai_server.errors import bad_field, unsupported
from rlhub.utils.tool_calls import schema_name

SCHEMA = ("name", "description", "parameters")


@dataclass(slots=True, kw_only=True)
class ToolUse:
    """The tools of a request.

    tools: the function schemas; their `strict` is not supported.  look: whether the answer is searched for calls.  must:
    the answer must begin with a call, of the tool `name` if one is named.  one: the answer ends with its first call.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    look: bool = False
    must: bool = False
    name: str = ""
    one: bool = False


def read_tools(body: dict[str, Any]) -> ToolUse:
    """Parses the tools of a chat request."""
    tools, choice, parallel = _tools(body.get("tools")), body.get("tool_choice"), body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise bad_field("parallel_tool_calls", parallel, "true or false")
    made = ToolUse(tools=tools, look=bool(tools) and choice != "none", one=parallel is False)
    if choice in (None, "auto", "none"):
        return made
    if choice != "required":
        made.name = _named(choice)
    if not tools or (made.name and made.name not in map(schema_name, tools)):
        raise bad_field("tool_choice", choice, f"one of the request's tools; they are {list(map(schema_name, tools))}")
    made.must = True
    return made


def _tools(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_field("tools", value, "a list of function tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field(f"tools[{index}]", tool, "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}")
    return [{"type": "function", "function": _ordered(tool["function"])} for tool in value]


def _ordered(function: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with its fields in one order, so that templates write the same tokens whichever client sends it.
    `strict` is left out, which is no field that a model reads."""
    first = {name: function[name] for name in SCHEMA if function.get(name) is not None}
    return first | {name: value for name, value in function.items() if name not in (*SCHEMA, "strict")}


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        known = "'auto', 'none', 'required' and {'type': 'function', 'function': {'name': ...}} are known"
        raise unsupported("tool_choice", f"got {choice!r:.100}; {known}")
    return name
