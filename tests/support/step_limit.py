"""Engines in other processes that step no further than a test lets them: what the test does to running requests meets them
there, however fast those processes are and however late the test's own is.

A process keeps to the file when the environment names it and it imports `limited_engines`.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

VARIABLE = "RLHUB_TEST_STEP_LIMIT"
ENGINES = "tests.support.limited_engines"
LIMIT_S = 120.0
STEP_S = 0.002


class StepLimit:
    """The test's side."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def set(self, limit: int) -> None:
        """Lets no request have another token when one has so many; 0: none begins."""
        _write(self.file, str(limit))

    def lift(self) -> None:
        """Lets the engine step on."""
        self.file.unlink(missing_ok=True)

    async def reached(self, limit: int, requests: int) -> None:
        """Waits until the engine stands at this limit with so many requests."""
        deadline = time.monotonic() + LIMIT_S
        while (found := _read(_reached(self.file))) != f"{limit} {requests}":
            assert time.monotonic() < deadline, f"it stands at (limit, requests) {found!r}"
            await asyncio.sleep(0.01)


def at_limit(most: int, requests: int) -> bool:
    """The engine's side, before each step: whether to leave it out.  most: tokens of the request that has most."""
    file = Path(os.environ[VARIABLE])
    limit = _read(file)
    if not limit or most < int(limit):
        return False
    reached = f"{limit} {requests}"
    if _read(_reached(file)) != reached:
        _write(_reached(file), reached)
    time.sleep(STEP_S)
    return True


def _reached(file: Path) -> Path:
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
