"""Schemas from typed functions, arguments held against them, and tools made of functions."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from rlhub.errors import ConfigError
from rlhub.tools.base import Tool, ToolError, ToolSource
from rlhub.tools.schemas import checked_arguments, schema_of
from rlhub.tools.toolbox import FunctionTool, Toolbox, load_tools, read_tool_file
from rlhub.utils.tool_calls import ToolCall, ToolResult


def search(query: str, limit: int = 3, kinds: list[str] | None = None, order: Literal["new", "old"] = "new") -> dict[str, Any]:
    """Search the archive,
    all of it.

    Args:
        query: what to look for,
            in any language
        limit (int): most results

    Returns:
        order: this is not a parameter's description
    """
    return {"query": query, "limit": limit}


def test_a_schema_is_what_the_function_says() -> None:
    assert schema_of(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive, all of it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in any language"},
                    "limit": {"type": "integer", "description": "most results"},
                    "kinds": {"type": "array", "items": {"type": "string"}},
                    "order": {"enum": ["new", "old"], "description": "this is not a parameter's description"},
                },
                "required": ["query"],
            },
        },
    }


def undescribed(x: int) -> int:
    return x


def untyped(x):
    """Do."""


def strange(x: set[int]) -> int:
    """Do."""
    return 0


def variadic(*x: int) -> int:
    """Do."""
    return 0


@pytest.mark.parametrize(
    ("function", "message"),
    [(undescribed, "docstring"), (untyped, "no type hint"), (strange, "no JSON schema"), (variadic, "cannot be given by name")],
)
def test_a_function_that_says_too_little_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        schema_of(function)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"query": "a"}, {"query": "a"}),
        ({"query": 5}, {"query": "5"}),
        ({"query": "a", "limit": "7"}, {"query": "a", "limit": 7}),
        ({"query": "a", "limit": 7.0}, {"query": "a", "limit": 7}),
    ],
)
def test_arguments_that_fit(given: dict[str, Any], taken: dict[str, Any]) -> None:
    assert checked_arguments(schema_of(search), given) == taken


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs the argument 'query'"),
        ({"query": "a", "limt": 1}, "did you mean 'limit'"),
        ({"query": "a", "limit": 1.5}, "of type integer"),
        ({"query": "a", "limit": True}, "of type integer"),
        ({"query": "a", "limit": "nan"}, "of type integer"),
        ({"query": "a", "limit": "inf"}, "of type integer"),
        ({"query": ["a"]}, "of type string"),
        ({"query": "a", "kinds": "b"}, "of type array"),
        ({"query": "a", "order": "up"}, "must be one of 'new', 'old'"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError, match=message):
        checked_arguments(schema_of(search), given)


def test_a_function_is_a_tool_and_its_settings_stay_hidden() -> None:
    tool = FunctionTool(search, bound={"limit": 9})
    assert "limit" not in tool.schema["function"]["parameters"]["properties"]
    assert asyncio.run(tool.execute("1", {"query": "a"})).text == '{"query": "a", "limit": 9}'


class Counter(Tool):
    """Remembers what was done with it."""

    schema = schema_of(search, name="count")  # type: ignore[assignment]

    def __init__(self) -> None:
        self.log: list[str] = []

    async def create(self, instance: str, row: Any) -> None:
        self.log.append(f"create {instance} {row['x']}")

    async def execute(self, instance: str, arguments: Any) -> ToolResult:
        self.log.append(f"execute {instance}")
        if arguments["query"] == "hang":
            await asyncio.sleep(60)
        return ToolResult(text=arguments["query"])

    async def release(self, instance: str) -> None:
        self.log.append(f"release {instance}")

    async def aclose(self) -> None:
        self.log.append("close")


class Source(ToolSource):
    def __init__(self, tool: Tool) -> None:
        self.tool = tool

    async def aopen(self) -> list[Tool]:
        await asyncio.sleep(0)
        return [self.tool]

    async def aclose(self) -> None:
        await self.tool.aclose()


def test_an_instance_lives_from_its_first_call_to_the_end_of_its_episode() -> None:
    tool = Counter()

    async def use() -> None:
        box = Toolbox([Source(tool)], timeout_s=60.0)
        await asyncio.gather(*(box.aopen() for _ in range(5)))
        async with box.session("unused", {"x": 0}):
            pass
        with pytest.raises(KeyError):
            async with box.session("a", {"x": 1}) as session:
                call = ToolCall(name="count", arguments={"query": "q"})
                both = await asyncio.gather(session.execute(call), session.execute(call))
                assert [result.text for result in both] == ["q", "q"]
                session._timeout_s = 0.05
                late = await session.execute(ToolCall(name="count", arguments={"query": "hang"}))
                assert late.failed and "not done after 0.05 s" in late.text
                raise KeyError
        await box.aclose()
        await box.aclose()

    asyncio.run(use())
    assert tool.log == ["create a 1", "execute a", "execute a", "execute a", "release a", "close"]


def test_two_tools_of_one_name_are_an_error() -> None:
    with pytest.raises(ToolError, match="two tools are called 'count'"):
        asyncio.run(Toolbox([Counter(), Source(Counter())], timeout_s=1.0).aopen())


def test_tools_from_a_file(tmp_path: Any) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n  - calculator\n  - name: {tmp_path / 'mine.py'}:twice\n    settings: {{by: 3}}\n")
    (tmp_path / "mine.py").write_text('def twice(x: int, by: int) -> int:\n    """Multiply."""\n    return x * by\n')
    calculator, twice = load_tools(read_tool_file(file), where="tools")
    assert isinstance(twice, FunctionTool) and asyncio.run(twice.execute("", {"x": 4})).text == "12"
    assert isinstance(calculator, Tool)


def test_every_wrong_entry_is_named() -> None:
    entries = ["calculater", {"name": "calculator", "settings": {"digits": 3}}, 7, "rlhub.nowhere:x", "math:pi"]
    with pytest.raises(ConfigError) as caught:
        load_tools(entries, where="here")
    assert len(caught.value.problems) == 5 and all(text.startswith("here, entry ") for text in caught.value.problems)


@pytest.mark.parametrize("content", ["", "tools: calculator", "tools: []", "other: [1]", "[: "])
def test_a_tool_file_without_tools(tmp_path: Any, content: str) -> None:
    (tmp_path / "tools.yaml").write_text(content)
    with pytest.raises(ConfigError, match="tool_config_path"):
        read_tool_file(tmp_path / "tools.yaml")
