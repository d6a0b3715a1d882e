"""What a run started is ended: nothing of it is left when the reaper says so."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psutil
import pytest

from rlhub.single_controller.ray import reaper


class Ending:
    """A process that was killed: its environment is gone at once, its memory and devices after so many looks."""

    pid = 7

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def status(self) -> str:
        return str(psutil.STATUS_RUNNING)

    def cmdline(self) -> list[str]:
        return []

    def kill(self) -> None: ...


def test_a_killed_process_is_waited_for_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(3)
    found = [[ending]]

    def wait_procs(processes: Collection[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        ending.looks -= bool(processes)
        return ([], list(processes)) if ending.looks > 0 else (list(processes), [])

    monkeypatch.setattr(reaper, "marked_processes", lambda marker: found.pop() if found else [])
    monkeypatch.setattr(reaper.psutil, "wait_procs", wait_procs)
    assert reaper.end_marked("mine", 60.0) == []
    assert ending.looks == 0
