"""Engines in other processes that step no further than a test lets them: what the test does to requests under way meets them
there, however fast those processes are and however late the test's own is.

A process keeps to the file when the environment names it and it imports `held_engines`.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

VARIABLE = "RLHUB_TEST_HOLD"
ENGINES = "tests.support.held_engines"
LIMIT_S = 120.0
STEP_S = 0.002


class Hold:
    """The test's side."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def at(self, limit: int) -> None:
        """No request gets a token more when one has so many; 0: none begins."""
        _write(self.file, str(limit))

    def let_go(self) -> None:
        self.file.unlink(missing_ok=True)

    async def reached(self, limit: int, requests: int) -> None:
        """Until the engine is held at this limit with so many requests."""
        deadline = time.monotonic() + LIMIT_S
        while (found := _read(_said(self.file))) != f"{limit} {requests}":
            assert time.monotonic() < deadline, f"held at (limit, requests) {found!r}"
            await asyncio.sleep(0.01)


def held(most: int, requests: int) -> bool:
    """The engine's side, before each step: whether it is to be left out.  most: tokens of the request that has most."""
    file = Path(os.environ[VARIABLE])
    limit = _read(file)
    if not limit or most < int(limit):
        return False
    said = f"{limit} {requests}"
    if _read(_said(file)) != said:
        _write(_said(file), said)
    time.sleep(STEP_S)
    return True


def _said(file: Path) -> Path:
    return file.with_name(f"{file.name}.reached")


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def _write(file: Path, text: str) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.rename(file)
