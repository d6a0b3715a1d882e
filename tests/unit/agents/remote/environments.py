"""Environments for tests of environment actors, named by `module:Class`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from rlhub.envs.base import Environment, StepEnvironment, StepResult
from rlhub.tools.base import ToolError
from rlhub.tools.schemas import schema_of
from rlhub.utils.tool_calls import ToolResult, ToolSchema

HERE = f"{__name__}:"


class Waiting(StepEnvironment):
    """Each step takes `seconds`, and until so many have been `together`; notes how many wait at once, in all actors.

    closing: its close takes so many seconds.
    """

    running = most = open = ending = 0
    lock = threading.Lock()

    def __init__(self, seconds: float = 0.002, together: int = 1, closing: float = 0.0) -> None:
        self._seconds, self._together, self._closing = seconds, together, closing
        self._count = 0
        with Waiting.lock:
            Waiting.open += 1

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._count = 0
        return f"seed {seed}", {"odd": object(), "seed": seed}

    async def step(self, action: Any) -> StepResult:
        if action == "raise":
            raise ValueError("no such move")
        with Waiting.lock:
            Waiting.running += 1
            Waiting.most = max(Waiting.most, Waiting.running)
        try:
            while Waiting.most < self._together:
                await asyncio.sleep(0.001)
            await asyncio.sleep(3600.0 if action == "hang" else self._seconds)
        finally:
            with Waiting.lock:
                Waiting.running -= 1
        self._count += 1
        return f"{action} {self._count}", 0.5, False, False, {}

    async def get_state(self) -> Any:
        return self._count

    async def load_state(self, state: Any) -> None:
        self._count = state

    async def close(self) -> None:
        with Waiting.lock:
            Waiting.ending += 1
        if self._closing:
            await asyncio.sleep(self._closing)
        with Waiting.lock:
            Waiting.open -= 1


def buy(item: str, count: int = 1) -> str:
    """Put into the basket.

    item: what.
    """
    return f"{count} {item}"


class Shop(Environment):
    """Sells until nothing is left."""

    closed: list[int] = []

    def __init__(self, stock: int = 3) -> None:
        self._stock = stock
        self._seed: int | None = None

    async def ainitialize(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._seed = seed

    async def list_tools(self) -> list[ToolSchema]:
        return [schema_of(buy)]

    async def aexecute(self, tool_name: str, tool_args: Mapping[str, Any]) -> ToolResult:
        count = tool_args.get("count", 1)
        if count < 0:
            raise ToolError("we do not buy")
        if count > self._stock:
            raise ValueError("not so many there")
        self._stock -= count
        return ToolResult(text=f"{self._stock} left, seed {self._seed}", reward=float(count), done=self._stock == 0)

    async def aclose(self) -> None:
        Shop.closed.append(self._stock)
