"""The task runner: every result arrives exactly once, in time, and as what it is."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlhub.errors import DeadlineError
from rlhub.utils.aio import loop_thread
from rlhub.utils.aio.results import Accepted, Cancelled, Failed, Reject, Rejected, TaskResult, TimedOut
from rlhub.utils.aio.task_runner import AsyncTaskRunner

LONG_S = 60.0
"""Nothing here takes so long, unless it hangs."""


@pytest.fixture
def runner() -> Iterator[AsyncTaskRunner]:
    runner = AsyncTaskRunner()
    yield runner
    runner.close()


async def give(value: Any, seconds: float = 0.0) -> Any:
    await asyncio.sleep(seconds)
    return value


async def fail_with(load: object) -> None:
    held = load
    raise ValueError("an error whose traceback holds the load", held is None)


async def fail(error: BaseException) -> None:
    raise error


def values(results: list[TaskResult]) -> list[Any]:
    assert all(isinstance(result, Accepted) for result in results), results
    return [result.value for result in results if isinstance(result, Accepted)]


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that no result announces."""
    end = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


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
    found = {result.task_id: result for result in runner.wait(len(ids), timeout=LONG_S)}
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
    until(lambda: runner.num_running == 1)
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
    until(lambda: runner.num_ready == 3)
    with pytest.raises(DeadlineError, match="3 of 5 are there, 0 tasks run, 0 are queued"):
        runner.wait(5, timeout=0.02)
    assert runner.num_ready == 3
    runner.submit(give, 4)
    runner.submit(give, 5)
    assert sorted(values(runner.wait(5, timeout=LONG_S))) == [1, 2, 3, 4, 5]


def test_a_full_result_queue_holds_back_new_tasks_and_nothing_breaks() -> None:
    runner = AsyncTaskRunner(max_results=2, max_concurrent=4)
    try:
        started: list[int] = []

        async def note(value: int) -> int:
            started.append(value)
            await asyncio.sleep(0)
            return value

        for value in range(300):
            runner.submit(note, value)
        until(lambda: runner.num_ready >= 2 and not runner.num_running)
        assert 2 <= len(started) <= 2 + 4  # those that were under way when the queue became full are kept
        assert sorted(values(runner.wait(300, timeout=LONG_S))) == list(range(300))  # a wait for more than fit is served too
        assert (runner.num_ready, runner.num_queued, runner.num_running) == (0, 0, 0)
    finally:
        runner.close()


def test_at_most_max_concurrent_run_and_submit_waits_for_room_in_the_queue() -> None:
    runner = AsyncTaskRunner(max_concurrent=2, max_queued=3)
    try:
        gate, most = asyncio.Event(), 0

        async def gated(value: int) -> int:
            nonlocal most
            most = max(most, runner.num_running)
            await gate.wait()
            return value

        def fill() -> None:
            for value in range(20):
                runner.submit(gated, value)

        feeder = threading.Thread(target=fill, daemon=True)
        feeder.start()
        until(lambda: runner.num_running == 2 and runner.num_queued == 4)  # three queued, and one that submit holds
        assert feeder.is_alive()
        runner.loop.call_soon_threadsafe(gate.set)
        assert sorted(values(runner.wait(20, timeout=LONG_S))) == list(range(20))
        feeder.join(LONG_S)
        assert most == 2 and not feeder.is_alive()
    finally:
        runner.close()


def test_asubmit_waits_without_holding_up_its_loop_and_leaves_no_trace_when_cancelled() -> None:
    runner = AsyncTaskRunner(max_queued=1)
    runner.pause()

    async def main() -> list[TaskResult]:
        await runner.asubmit(give, 1)
        second = asyncio.create_task(runner.asubmit(give, 2))
        third = asyncio.create_task(runner.asubmit(give, 3))
        await asyncio.sleep(0.02)
        assert runner.num_queued == 3 and not second.done() and not third.done()
        second.cancel()
        assert isinstance((await asyncio.gather(second, return_exceptions=True))[0], asyncio.CancelledError)
        runner.resume()
        await third
        return await runner.await_results(2, timeout=LONG_S)

    try:
        assert values(asyncio.run(main())) == [1, 3]
        assert (runner.num_queued, runner.num_ready) == (0, 0)
    finally:
        runner.close()


def test_cancel_ends_queued_and_running_tasks_and_says_whether_there_was_one(runner: AsyncTaskRunner) -> None:
    running = runner.submit(give, 1, LONG_S)
    until(lambda: runner.num_running == 1)
    runner.pause()
    queued = runner.submit(give, 2)
    assert runner.cancel(queued) and runner.cancel(running) and not runner.cancel("nobody")
    assert {result.task_id for result in runner.wait(2, timeout=LONG_S)} == {queued, running}
    assert not runner.cancel(queued) and runner.num_queued == 0
    runner.resume()
    for _ in range(200):  # at every moment of a task's start
        assert runner.cancel(runner.submit(give, 1, LONG_S))
    assert all(isinstance(result, Cancelled) for result in runner.wait(200, timeout=LONG_S))


def test_a_task_that_catches_its_cancellation_ends_as_what_it_returns(runner: AsyncTaskRunner) -> None:
    async def partial() -> str:
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            return "what there was"
        return "all"

    runner.submit(partial, deadline=0.02)
    assert values(runner.wait(1, timeout=LONG_S)) == ["what there was"]


def test_a_deadline_that_passes_before_the_first_step_is_a_deadline(runner: AsyncTaskRunner) -> None:
    """The loop is held up between a task's start and its first step, where uvloop looks at timers."""
    go, begun = threading.Event(), threading.Event()

    async def slow() -> None:
        begun.set()
        await asyncio.sleep(LONG_S)

    runner.loop.call_soon_threadsafe(go.wait)
    task = runner.submit(slow, deadline=0.01)
    runner.loop.call_soon_threadsafe(time.sleep, 0.05)
    go.set()
    assert runner.wait(1, timeout=LONG_S) == [TimedOut(task_id=task, deadline_s=0.01)]
    assert begun.is_set() and runner.num_running == 0


def test_ids_are_unique_among_tasks_that_live(runner: AsyncTaskRunner) -> None:
    assert runner.submit(give, 1, LONG_S, task_id="0") == "0"  # which the runner would have chosen next, too
    assert runner.submit(give, 2) != "0"
    with pytest.raises(ValueError, match="'0' is still queued or running"):
        runner.submit(give, 3, task_id="0")
    runner.cancel("0")
    runner.wait(2, timeout=LONG_S)
    assert runner.submit(give, 4, task_id="0") == "0"
    assert values(runner.wait(1, timeout=LONG_S)) == [4]


def test_waiters_are_served_in_turn_and_one_that_goes_away_gives_back(runner: AsyncTaskRunner) -> None:
    async def main() -> list[list[TaskResult]]:
        gone = asyncio.create_task(runner.await_results(2))
        first = asyncio.create_task(runner.await_results(2, timeout=LONG_S))
        second = asyncio.create_task(runner.await_results(1, timeout=LONG_S))
        await asyncio.sleep(0.02)
        runner.submit(give, 1)
        until(lambda: runner.num_ready == 1)
        gone.cancel()
        runner.submit(give, 2)
        runner.submit(give, 3)
        return [await first, await second]

    first, second = asyncio.run(main())
    assert values(first) == [1, 2] and values(second) == [3]


def test_a_waiter_that_was_served_and_cancelled_in_the_same_moment_gives_back(runner: AsyncTaskRunner) -> None:
    async def main() -> None:
        waiting = asyncio.create_task(runner.await_results(1))
        await asyncio.sleep(0.02)
        runner.submit(give, 1)
        until(lambda: not runner._results._waiters)  # it is served, and its loop has not noticed
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())
    assert values(runner.wait(1, timeout=LONG_S)) == [1]


def test_on_result_runs_on_the_loop_may_submit_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    done = threading.Event()

    def take(result: TaskResult) -> None:
        assert asyncio.get_running_loop() is runner.loop
        seen.extend(values([result]))
        if seen[-1] == 1:
            raise ValueError("a bug of the callback's")
        if seen[-1] == 3000:
            done.set()
        else:
            runner.submit(give, seen[-1] + 1)  # far more often than a recursion could go deep

    runner = AsyncTaskRunner(on_result=take)
    try:
        runner.submit(give, 1)
        runner.submit(give, 2)
        assert done.wait(LONG_S)
        assert seen == list(range(1, 3001)) and runner.num_ready == 0
        assert "on_result of tasks failed for task 0" in caplog.text
    finally:
        runner.close()


def test_close_ends_everything_once_and_wakes_who_waits() -> None:
    runner = AsyncTaskRunner(max_concurrent=1, max_queued=1)
    failures: list[BaseException] = []

    def waiting(call: Any, *args: Any) -> threading.Thread:
        def main() -> None:
            try:
                call(*args)
            except RuntimeError as error:
                failures.append(error)

        thread = threading.Thread(target=main, daemon=True)
        thread.start()
        return thread

    runner.submit(give, 1, LONG_S)
    until(lambda: runner.num_running == 1)
    runner.submit(give, 2)
    threads = [waiting(runner.submit, give, 3), waiting(runner.wait, 50)]
    until(lambda: runner.num_queued == 2)
    runner.close()
    runner.close()
    for thread in threads:
        thread.join(LONG_S)
    assert len(failures) == 2 and all("closed" in str(error) for error in failures)
    assert [type(result) for result in runner.poll()] == [Cancelled] * 3
    with pytest.raises(RuntimeError, match="is closed"):
        runner.submit(give, 4)
    with pytest.raises(RuntimeError, match="was closed: 0 of 1"):
        runner.wait(1)
    assert not runner.cancel("0")


def test_nothing_waits_on_its_own_loop(runner: AsyncTaskRunner) -> None:
    async def deadlock() -> None:
        runner.wait(1)

    runner.submit(deadlock)
    (result,) = runner.wait(1, timeout=LONG_S)
    assert isinstance(result, Failed) and "use await_results" in str(result.error)


@pytest.mark.parametrize("limit", ["max_concurrent", "max_queued", "max_results"])
def test_limits_below_one_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit} of the task runner 'tasks' is 0"):
        AsyncTaskRunner(**{limit: 0})


class TimerCounter(asyncio.SelectorEventLoop):
    """Counts timers, without which nothing can poll."""

    timers = 0

    def call_at(self, *args: Any, **kwargs: Any) -> Any:
        TimerCounter.timers += 1
        return super().call_at(*args, **kwargs)


def test_no_part_of_it_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "new_event_loop", TimerCounter)
    runner = AsyncTaskRunner(max_concurrent=2, max_queued=2, max_results=2)
    try:
        gate = asyncio.Event()
        runner.submit(gate.wait)
        until(lambda: runner.num_running == 1)
        for value in range(50):  # while another task runs
            runner.submit(give, value + 1, 0)
            runner.pause()
            runner.resume()
            assert values(runner.wait(1, timeout=LONG_S)) == [value + 1]
        assert TimerCounter.timers == 0
        runner.submit(give, 1, 0, deadline=LONG_S)  # the control: a deadline is a timer
        runner.wait(1, timeout=LONG_S)
        assert TimerCounter.timers == 1
    finally:
        runner.close()


def test_finished_tasks_leave_nothing_behind_not_even_for_the_garbage_collector(runner: AsyncTaskRunner) -> None:
    class Load:
        """What an episode carries."""

    loads = []
    gc.disable()
    try:
        for number in range(30):
            load = Load()
            loads.append(weakref.ref(load))
            match number % 3:
                case 0:
                    runner.submit(give, load)
                case 1:
                    runner.submit(fail_with, load)
                case 2:
                    runner.cancel(runner.submit(give, load, LONG_S))
        del load
        runner.wait(30, timeout=LONG_S)
        until(lambda: not any(load() for load in loads))
    finally:
        gc.enable()


def test_whatever_threads_do_each_task_has_exactly_one_outcome() -> None:
    runner = AsyncTaskRunner(max_concurrent=7, max_queued=5, max_results=11)
    submitted: list[str] = []
    found: list[str] = []
    busy = threading.Event()
    busy.set()

    def feed(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(120):
            deadline = choose.choice([None, 0.0005])
            task = runner.submit(give, choose.choice([1, None]), choose.choice([0, 0.001]), deadline=deadline)
            submitted.append(task)
            if choose.random() < 0.2:
                runner.cancel(choose.choice(submitted))

    def drain(seed: int) -> None:
        choose = random.Random(seed)
        while busy.is_set():
            try:
                found.extend(result.task_id for result in runner.wait(choose.randint(1, 20), timeout=choose.random() * 0.002))
            except TimeoutError:
                found.extend(result.task_id for result in runner.poll(choose.randint(0, 3)))

    feeders = [threading.Thread(target=feed, args=(seed,), daemon=True) for seed in range(3)]
    drainers = [threading.Thread(target=drain, args=(seed,), daemon=True) for seed in range(2)]
    for thread in (*feeders, *drainers):
        thread.start()
    for _ in range(20):
        runner.pause()
        time.sleep(0.001)
        runner.resume()
    for thread in feeders:
        thread.join(LONG_S)
    until(lambda: len(found) >= len(submitted))
    busy.clear()
    for thread in drainers:
        thread.join(LONG_S)
    found.extend(result.task_id for result in runner.poll())
    runner.close()
    assert len(submitted) == 360 and sorted(found) == sorted(submitted)
