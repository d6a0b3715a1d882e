"""What tests of asynchronous actors host, in process and in Ray."""

from __future__ import annotations

import asyncio

from rlhub.errors import DataError
from rlhub.single_controller import Worker


class Server(Worker):
    """A hosted object as engines and environments are.  most: calls that ran at the same time."""

    def __init__(self, base: int, fail: bool = False) -> None:
        if fail:
            raise ValueError("no such model")
        self.base = base
        self.cancelled: list[int] = []
        self.most = self.now = 0

    async def add(self, value: int, seconds: float = 0.0) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(value)
            raise
        finally:
            self.now -= 1
        return self.base + value

    async def meet(self, value: int, count: int) -> int:
        """`add`, which takes until so many have been here at the same time."""
        self.now += 1
        self.most = max(self.most, self.now)
        while self.most < count:
            await asyncio.sleep(0.001)
        self.now -= 1
        return self.base + value

    async def running(self) -> int:
        """Calls of `add` now."""
        return self.now

    async def bad_row(self) -> None:
        raise DataError("row 3 has no prompt")

    async def give_up(self) -> None:
        raise asyncio.CancelledError
