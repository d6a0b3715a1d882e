"""The task runner: every outcome arrives exactly once, in time, and as what it is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlhub.errors import DeadlineError
from rlhub.utils.outcomes import Accepted, Cancelled, Failed, Outcome, Reject, Rejected, TimedOut
from rlhub.utils.task_runner import AsyncTaskRunner

LONG_S = 10.0
"""Nothing here takes so long, unless it hangs."""


@pytest.fixture
def runner() -> Iterator[AsyncTaskRunner]:
    runner = AsyncTaskRunner()
    yield runner
    runner.close()


async def give(value: Any, seconds: float = 0.0) -> Any:
    await asyncio.sleep(seconds)
    return value


async def fail(error: BaseException) -> None:
    raise error


def values(outcomes: list[Outcome]) -> list[Any]:
    assert all(isinstance(outcome, Accepted) for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes if isinstance(outcome, Accepted)]


def test_every_way_to_end_has_its_type(runner: AsyncTaskRunner) -> None:
    error = ValueError("bad tool")
    ids = {
        "accepted": runner.submit(give, 3),
        "none": runner.submit(give, None),
        "rejected": runner.submit(fail, Reject("too long")),
        "failed": runner.submit(fail, error),
        "timed out": runner.submit(give, 1, LONG_S, deadline=0.02),
        "cancelled": runner.submit(give, 1, LONG_S),
        "exited": runner.submit(fail, SystemExit(3)),
    }
    assert runner.cancel(ids["cancelled"])
    found = {outcome.task_id: outcome for outcome in runner.wait(len(ids), timeout=LONG_S)}
    assert found[ids["accepted"]] == Accepted(task_id=ids["accepted"], value=3)
    assert found[ids["none"]] == Rejected(task_id=ids["none"], reason="the task returned None")
    assert found[ids["rejected"]] == Rejected(task_id=ids["rejected"], reason="too long")
    assert found[ids["failed"]] == Failed(task_id=ids["failed"], error=error)
    assert found[ids["timed out"]] == TimedOut(task_id=ids["timed out"], deadline_s=0.02)
    assert found[ids["cancelled"]] == Cancelled(task_id=ids["cancelled"])
    assert isinstance(found[ids["exited"]], Failed)  # and the loop lives:
    runner.submit(give, 4)
    assert values(runner.wait(1, timeout=LONG_S)) == [4]


def test_pause_starts_nothing_and_still_delivers(runner: AsyncTaskRunner) -> None:
    go = threading.Event()

    async def until_told() -> str:
        await asyncio.get_running_loop().run_in_executor(None, go.wait)
        return "old"

    runner.submit(until_told)
    while not runner.num_running:
        time.sleep(0.001)
    runner.pause()
    runner.submit(give, "new")
    go.set()
    assert values(runner.wait(1, timeout=LONG_S)) == ["old"]
    with pytest.raises(TimeoutError):
        runner.wait(1, timeout=0.05)
    assert (runner.num_queued, runner.num_running) == (1, 0)
    runner.resume()
    assert values(runner.wait(1, timeout=LONG_S)) == ["new"]


def test_a_wait_that_times_out_loses_nothing(runner: AsyncTaskRunner) -> None:
    for value in range(3):
        runner.submit(give, value + 1)
    with pytest.raises(DeadlineError, match="3 of 5 are there, 0 tasks run, 0 are queued"):
        runner.wait(5, timeout=0.1)
    assert runner.num_ready == 3
    runner.submit(give, 4)
    runner.submit(give, 5)
    assert sorted(values(runner.wait(5, timeout=LONG_S))) == [1, 2, 3, 4, 5]
