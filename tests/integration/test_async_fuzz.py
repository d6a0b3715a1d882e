"""A short run of the fuzz of asynchronous training: replicas in Ray actors that are killed, and a driver that is killed -9.

The long ones are scripts/bench/async_fuzz.py's own.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhub.engines.rollout.continuous_batching import TokenEvent
from rlhub.engines.rollout.fake import FakeStepper

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
SLOW_STEP_S = 0.04
"""A request then takes a quarter of a second: at each look at the queue some wait for a place."""


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


def test_replicas_come_and_go_and_nothing_is_lost_cut_short_or_stale(fuzz: Any, tmp_path: Path) -> None:
    """In this process; the program does it over Ray actors, with kills of those that start."""
    plan = fuzz.Plan(folder=tmp_path / "run", steps=16, policy="mask", backend="local", kill_every=0, scale=True)
    result = fuzz.whole_run(plan)
    assert result.problems == []
    added, removed, _ = map(int, result.shown["added / removed / failed"].split(" / "))
    assert added >= 1 and removed >= 1


def test_the_queue_alone_adds_a_replica_and_removes_one_and_nothing_is_lost(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the trainer waits for requests that queue, then the episodes wait for their tools, and few requests are there.

    However fast the machine is: the engine is slow at first, and the start of a replica counts as one that took no time.
    """
    monkeypatch.setattr(fuzz, "SCALED", 0.0)
    step, pace = FakeStepper.step, [SLOW_STEP_S]

    def paced(stepper: FakeStepper) -> Sequence[TokenEvent]:
        time.sleep(pace[0])
        return step(stepper)

    monkeypatch.setattr(FakeStepper, "step", paced)
    plan = fuzz.Plan(folder=tmp_path / "run", steps=1, policy="mask", backend="local", kill_every=0, scale=True)
    loop = fuzz.Loop(plan)

    def train_until(change: str) -> None:
        loop.service.control.rule.start_s = 0.0
        deadline = time.monotonic() + 240
        while not loop.service.control.counts[change]:
            assert time.monotonic() < deadline, f"the queue does not {change} a replica"
            loop.train_step()

    try:
        settings = loop.executor.workflow_for({}).parts.kwargs
        train_until("add")
        settings["mean_s"], pace[0] = 5.0, 0.0
        train_until("remove")
        settings["mean_s"] = plan.mean_s
        loop.stop.set()
        while loop.train_step():
            pass
        assert fuzz.fuzz.findings(plan.folder, loop.ledger, plan.max_staleness) + loop.witness.findings() == []
        reasons = {change.action: change.reason for change in loop.service.control.changes}
        assert "requests wait for a place" in reasons["add"] and "requests at once" in reasons["remove"]
    finally:
        loop.close()


@pytest.mark.parametrize(("broken", "what"), [("stale", "got tokens of old weights"), ("drops", "were cut short")])
def test_the_fuzz_finds_a_fleet_that_is_broken(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, what: str
) -> None:
    name, method = fuzz.fuzz.BROKEN[broken]
    monkeypatch.setattr(fuzz.Fleet, name, method)
    monkeypatch.setattr(fuzz, "SCALED", 1.0)
    plan = fuzz.Plan(folder=tmp_path / "run", steps=60, policy="mask", backend="local", kill_every=0, scale=True)
    assert any(what in problem for problem in fuzz.whole_run(plan).problems)


def test_what_a_killed_driver_scored_after_its_checkpoint_did_not_happen(fuzz: Any, tmp_path: Path) -> None:
    """The run that goes on may end before it draws those prompts."""
    parts = fuzz.fuzz
    records = parts.Records(tmp_path)
    for ordinal in (3, 4, 5, 6):
        records.scored.add([ordinal, 0, 77])
    records.close()
    parts.take_back(tmp_path, dict.fromkeys(parts.ENDS, 0), 5)
    assert parts.read_lines(tmp_path / "scored.jsonl") == [[3, 0, 77], [4, 0, 77]]
