"""A short run of the fuzz of asynchronous training: replicas in Ray actors that are killed, and a driver that is killed -9.

The long ones are scripts/bench/async_fuzz.py's own.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import async_fuzz

    return async_fuzz


def test_every_prompt_ends_exactly_once_while_replicas_are_killed(
    ray_cluster: None, fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = fuzz.Loop.kill_replica

    def kill_one_of_two(loop: Any, drawn: random.Random) -> None:
        """The last one is never killed: where the other is late with its weights it is waited for."""
        deadline = time.monotonic() + 240
        while len(loop.service.router.fleet.serving()) < 2:
            assert time.monotonic() < deadline, "a replica does not come back"
            time.sleep(0.02)
        kill(loop, drawn)

    monkeypatch.setattr(fuzz.Loop, "kill_replica", kill_one_of_two)
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


def test_what_a_killed_driver_scored_after_its_checkpoint_did_not_happen(fuzz: Any, tmp_path: Path) -> None:
    """The run that goes on may end before it draws those prompts."""
    parts = fuzz.fuzz
    records = parts.Records(tmp_path)
    for ordinal in (3, 4, 5, 6):
        records.scored.add([ordinal, 0, 77])
    records.close()
    parts.take_back(tmp_path, dict.fromkeys(parts.ENDS, 0), 5)
    assert parts.read_lines(tmp_path / "scored.jsonl") == [[3, 0, 77], [4, 0, 77]]
