"""The task runner against plain uvloop, and the same runner over Ray actors against itself in process; all ratios within one run.

    python scripts/bench/runner.py [--rounds 5] [--tasks 20000] [--wave 10000] [--no-ray]

Both sides of a ratio take turns, and the median over the rounds counts.  Exit status 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import ray
from rich.console import Console
from rich.table import Table

from rlhub.single_controller import ActorTaskRunner, AsyncActor, AsyncActorOptions, ClassWithInitArgs, start_async_actor
from rlhub.single_controller.ray import connect
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.aio.task_runner import AsyncTaskRunner
from rlhub.utils.collector import heap_set_aside

ACTOR_LOADS = ((50, 0.01, 3000), (200, 0.1, 2000))
"""Concurrent episodes, seconds each waits, number of episodes."""


async def trivial(value: int) -> int:
    return value + 1


async def yielding(value: int) -> int:
    await asyncio.sleep(0)
    return value + 1


async def episode(seconds: float) -> dict[str, list[int]]:
    """Waits, and returns what an episode of 100 tokens returns."""
    await asyncio.sleep(seconds)
    return {"tokens": list(range(1000, 1100)), "mask": [1] * 100}


class Episodes:
    """What lives in the actors."""

    async def run(self, seconds: float) -> dict[str, list[int]]:
        return await episode(seconds)

    async def rss(self) -> int:
        gc.collect()
        return psutil.Process().memory_info().rss


class Report:
    """The table, and whether every limit was kept."""

    def __init__(self) -> None:
        self.good = True
        self._table = Table(title=f"Task runner ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start)")
        for column in ("", "measured", "limit", ""):
            self._table.add_column(column)

    def add(self, what: str, measured: str, limit: str = "", kept: bool = True) -> None:
        self._table.add_row(what, measured, limit, "" if kept else "[red]missed")
        self.good = self.good and kept

    def show(self) -> None:
        Console(width=150).print(self._table)


def median_ratio(rounds: int, ours: Callable[[], float], other: Callable[[], float]) -> tuple[float, float, float]:
    """Median ratio of two rates that are measured in turns, and the medians; the first round warms up."""
    pairs = [(ours(), other()) for _ in range(rounds + 1)][1:]
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    return ratio, statistics.median(mine for mine, _ in pairs), statistics.median(theirs for _, theirs in pairs)


def through(runner: AsyncTaskRunner, num_tasks: int, what: Any, *args: Any) -> float:
    """Tasks a second, submitted by this thread."""
    start = time.perf_counter()
    for _ in range(num_tasks):
        runner.submit(what, *args)
    outcomes = runner.wait(num_tasks)
    seconds = time.perf_counter() - start
    failed = [outcome for outcome in outcomes if type(outcome).__name__ != "Accepted"]
    if failed:
        raise RuntimeError(f"{len(failed)} tasks did not end well, the first: {failed[0]}")
    return num_tasks / seconds


def plain(thread: LoopThread, num_tasks: int, what: Callable[[int], Coroutine[Any, Any, int]]) -> float:
    """Tasks a second of create_task and gather on the same kind of loop."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = time.perf_counter()
        await asyncio.gather(*[loop.create_task(what(1)) for _ in range(num_tasks)])
        return num_tasks / (time.perf_counter() - start)

    return float(thread.run(main()))


@contextmanager
def running(**limits: Any) -> Iterator[AsyncTaskRunner]:
    runner = AsyncTaskRunner(**limits)
    try:
        yield runner
    finally:
        runner.close()


def throughput(report: Report, rounds: int, num_tasks: int) -> None:
    thread = LoopThread("plain")
    with (
        running() as runner,
        heap_set_aside(),
    ):  # which plain tasks, all alive at once, would pay for
        for name, what, limit in (("trivial tasks", trivial, 0.6), ("tasks that yield once", yielding, 0.0)):
            ratio, mine, theirs = median_ratio(
                rounds, partial(through, runner, num_tasks, what, 1), partial(plain, thread, num_tasks, what)
            )
            measured = f"{ratio:.2f} of plain uvloop ({mine:,.0f} / {theirs:,.0f} a second)"
            report.add(name, measured, f">= {limit}" if limit else "", ratio >= limit)
    thread.stop()


def latencies(report: Report, samples: int = 400) -> None:
    async def started() -> float:
        return time.perf_counter()

    with running() as runner:
        slow = runner.submit(asyncio.sleep, 3600, True)
        waits = []
        for _ in range(samples):
            submitted = time.perf_counter()
            runner.submit(started)
            (outcome,) = runner.wait(1)
            waits.append((outcome.value - submitted) * 1e3)  # type: ignore[union-attr]
            time.sleep(0.001)
        ordered = sorted(waits)
        p50, p95 = ordered[samples // 2], ordered[int(samples * 0.95)]
        report.add("submit to start while a slow task runs", f"p50 {p50:.3f} ms, p95 {p95:.3f} ms", "p50 < 2 ms", p50 < 2)
        runner.cancel(slow)
        runner.wait(1)


def pausing(report: Report, samples: int = 40) -> None:
    delays, resumes = [], []
    with running() as runner:
        for _ in range(samples):
            gate = threading.Event()
            runner.submit(asyncio.to_thread, lambda gate=gate: gate.wait() or True)
            while not runner.num_running:
                time.sleep(0.0005)
            runner.pause()
            runner.submit(trivial, 1)
            start = time.perf_counter()
            gate.set()
            runner.wait(1, timeout=10)
            delays.append((time.perf_counter() - start) * 1e3)
            kept = runner.num_queued == 1 and runner.num_ready == 0
            if not kept:
                raise RuntimeError("a task started while the runner was paused")
            start = time.perf_counter()
            runner.resume()
            runner.wait(1, timeout=10)
            resumes.append((time.perf_counter() - start) * 1e3)
    report.add("delivered while paused", f"all {samples}; {statistics.median(delays):.2f} ms after the end", "all")
    worst = max(resumes)
    middle = statistics.median(resumes)
    report.add("resume to first result", f"median {middle:.2f} ms, worst {worst:.2f} ms", "< 20 ms", middle < 20)


def over_ray(report: Report, rounds: int, actors: dict[int, AsyncActor]) -> None:
    for concurrent, seconds, number in ACTOR_LOADS:
        name = f"{concurrent} episodes at once, {seconds * 1e3:.0f} ms each, in one Ray actor"

        def inside(concurrent: int = concurrent, seconds: float = seconds, number: int = number) -> float:
            with running(max_concurrent=concurrent) as runner:
                return through(runner, number, episode, seconds)

        for surplus, label, limit in ((2, "", 0.8), (1, "; none waiting in the actor", 0.0)):

            def outside(
                surplus: int = surplus, concurrent: int = concurrent, seconds: float = seconds, number: int = number
            ) -> float:
                runner = ActorTaskRunner([actors[concurrent]], max_concurrent=surplus * concurrent)
                try:
                    return through(runner, number, "run", seconds)
                finally:
                    runner.close()

            ratio, mine, theirs = median_ratio(rounds, outside, inside)
            measured = f"{ratio:.2f} of in process ({mine:,.0f} / {theirs:,.0f} a second)"
            report.add(name + label, measured, f">= {limit}" if limit else "", ratio >= limit)


@ray.remote(num_cpus=0)
class Bare:
    """The comparison: one Ray call per episode."""

    async def run(self, seconds: float) -> dict[str, list[int]]:
        return await episode(seconds)


def saturation(report: Report, actors: list[AsyncActor], number: int = 6000) -> None:
    """Episodes that return at once: what the way to the actors and back carries."""
    for count in range(1, len(actors) + 1):
        pool = ActorTaskRunner(actors[:count], max_concurrent=400)
        through(pool, 500, "run", 0.0)
        rate = max(through(pool, number, "run", 0.0) for _ in range(3))
        pool.close()
        report.add(f"saturation, {count} Ray actor(s)", f"{rate:,.0f} episodes a second")
    bare = Bare.options(max_concurrency=1000).remote()  # type: ignore[attr-defined]

    async def single() -> Any:
        return await bare.run.remote(0.0)

    with running(max_concurrent=400) as runner:
        through(runner, 200, single)
        rate = max(through(runner, number // 6, single) for _ in range(2))
    report.add("saturation with one Ray call per episode", f"{rate:,.0f} episodes a second")
    ray.kill(bare)


def memory(report: Report, wave: int, actor: AsyncActor | None) -> None:
    """RSS after a second wave of episodes against after the first."""

    def own() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    with running(max_concurrent=500) as runner:
        through(runner, wave, episode, 0.0)
        before = own()
        through(runner, wave, episode, 0.0)
        ratio = own() / before
    report.add(f"RSS after the second {wave:,} episodes, in process", f"{ratio:.3f} of after the first", "<= 1.10", ratio <= 1.1)
    if actor is None:
        return
    remote = ActorTaskRunner([actor], max_concurrent=500)

    def both() -> tuple[int, int]:
        remote.submit("rss")
        (outcome,) = remote.wait(1)
        return own(), outcome.value  # type: ignore[union-attr]

    through(remote, wave, "run", 0.0)
    first = both()
    through(remote, wave, "run", 0.0)
    second = both()
    remote.close()
    for who, before, after in zip(("driver", "actor"), first, second, strict=True):
        ratio = after / before
        what = f"RSS after the second {wave:,} episodes over Ray, {who}"
        report.add(what, f"{ratio:.3f} of after the first", "<= 1.10", ratio <= 1.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--wave", type=int, default=10_000)
    parser.add_argument("--ray", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    report = Report()
    throughput(report, arguments.rounds, arguments.tasks)
    latencies(report)
    pausing(report)
    if not arguments.ray:
        memory(report, arguments.wave, None)
        report.show()
        sys.exit(0 if report.good else 1)
    connection = connect({"object_store_memory": 200 * 2**20}, device="cpu", num_ranks=len(ACTOR_LOADS))
    try:
        actors = {
            concurrent: start_async_actor(
                ClassWithInitArgs(Episodes), AsyncActorOptions(name=f"episodes-{concurrent}", max_concurrency=concurrent)
            )
            for concurrent, _, _ in ACTOR_LOADS
        }
        over_ray(report, arguments.rounds, actors)
        saturation(report, list(actors.values()))
        memory(report, arguments.wave, actors[200])
        for actor in actors.values():
            actor.kill()
    finally:
        connection.close()
    report.show()
    sys.exit(0 if report.good else 1)


if __name__ == "__main__":
    main()
