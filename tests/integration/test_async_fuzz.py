"""A short run of the fuzz of asynchronous training: replicas in Ray actors that are killed, and a driver that is killed -9.

The long ones are scripts/bench/async_fuzz.py's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import async_fuzz

    return async_fuzz


def test_every_prompt_ends_exactly_once_while_replicas_are_killed(ray_cluster: None, fuzz: Any, tmp_path: Path) -> None:
    result = fuzz.whole_run(fuzz.Plan(folder=tmp_path / "run", steps=24, policy="mask", kill_every=12, checkpoint_every=5))
    assert result.problems == []
    kills, _ = result.shown["kills / pauses"].split(" / ")
    assert int(kills) >= 1


def test_every_prompt_ends_exactly_once_when_the_driver_is_killed(fuzz: Any, tmp_path: Path) -> None:
    plan = fuzz.Plan(
        folder=tmp_path / "run", steps=20, policy="drop", backend="local", kill_every=0, checkpoint_every=3, driver_kills=1
    )
    result = fuzz.killed_run(plan)
    assert result.problems == []
    assert result.shown["driver kills"] == "1"
