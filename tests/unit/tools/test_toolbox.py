"""What a tool's code returns, as what the model reads and what the episode is credited with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlhub.tools.toolbox import FunctionTool, Toolbox
from rlhub.utils.tool_calls import ToolCall, ToolResult, as_result


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("4", ToolResult(text="4")),
        (
            ("4", 0.5, {"hits": 2, "found": True, "note": "x"}),
            ToolResult(text="4", reward=0.5, metrics={"hits": 2.0, "found": 1.0}),
        ),
        (("4", None, None), ToolResult(text="4")),
        (("4", 1), ToolResult(text='["4", 1]')),
        (("a", "b", "c"), ToolResult(text='["a", "b", "c"]')),
        ((1, 2, 3), ToolResult(text="[1, 2, 3]")),
        ({"a": 1}, ToolResult(text='{"a": 1}')),
    ],
)
def test_a_tuple_of_text_reward_and_metrics_is_taken_apart(value: Any, result: ToolResult) -> None:
    assert as_result(value) == result


def test_a_reward_that_is_not_finite_is_an_error_of_the_tool() -> None:
    def search(query: str) -> tuple[str, float, dict[str, float]]:
        """Search."""
        return query, float("nan"), {}

    async def run() -> ToolResult:
        box = Toolbox([FunctionTool(search)], timeout_s=10.0)
        await box.aopen()
        async with box.session("episode", {}) as session:
            return await session.execute(ToolCall(name="search", arguments={"query": "a"}))

    found = asyncio.run(run())
    assert found.failed and found.reward == 0.0 and "reward nan" in found.text
