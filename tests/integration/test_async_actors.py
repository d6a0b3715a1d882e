"""Asynchronous actors in Ray: many calls at once, typed failures, set-up of the process, and its end with the driver's."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhub.errors import ConfigError, DataError, DeadlineError, WorkerDiedError, WorkerError
from rlhub.single_controller import (
    ActorTaskRunner,
    AsyncActor,
    AsyncActorOptions,
    ClassWithInitArgs,
    astart_async_actor,
    start_async_actor,
)
from rlhub.utils.aio.results import Accepted, Cancelled, Failed, TimedOut
from tests.support.hosted import Server
from tests.support.processes import alive

LONG_S = 240.0


class RayServer(Server):
    """With what can be asked of a process of its own."""

    async def facts(self) -> dict[str, Any]:
        logging.getLogger("server").warning("a line for the log")
        wanted = ("SECRET_FOLDER", "OMP_NUM_THREADS", "MASTER_PORT", "RLHUB_TEST_PLUGIN")
        return {"pid": os.getpid(), "role": self.context.role, **{name: os.environ.get(name) for name in wanted}}

    async def cancellations(self) -> list[int]:
        return self.cancelled

    async def no_pickle(self) -> Any:
        return open(os.devnull, "rb")

    async def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid

    async def die(self) -> None:
        os.write(2, b"last words\n")
        os._exit(3)


class Unreadable:
    """Pickles, and cannot be read on the other side."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.stat, ("/nowhere/at/all",)


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + LONG_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("actors")


@pytest.fixture(scope="module")
def actors(ray_cluster: None, folder: Path) -> Iterator[list[AsyncActor]]:
    """Two, started at the same time, with all that can be set."""
    (folder / "actor_plugin.py").write_text("import os\nos.environ['RLHUB_TEST_PLUGIN'] = 'loaded'\n")

    async def both() -> list[AsyncActor]:
        return await asyncio.gather(*[astart_async_actor(ClassWithInitArgs(RayServer, 10), options(folder, n)) for n in range(2)])

    sys.path.append(str(folder))
    started = asyncio.run(both())
    yield started
    sys.path.remove(str(folder))
    for actor in started:
        actor.kill()


def options(folder: Path, number: int) -> AsyncActorOptions:
    return AsyncActorOptions(
        name=f"server-{number}",
        worker_env={"SECRET_FOLDER": "/a/folder"},
        log_dir=str(folder),
        plugins=("actor_plugin",),
        max_concurrency=50,
        start_deadline_s=300.0,
    )


def test_the_process_is_set_up_as_a_workers(actors: list[AsyncActor], folder: Path) -> None:
    facts = asyncio.run(actors[0].call("facts"))
    assert facts.pop("pid") not in (os.getpid(), asyncio.run(actors[1].call("facts"))["pid"])
    assert int(facts.pop("MASTER_PORT")) > 0
    expected = {"role": "server-0", "SECRET_FOLDER": "/a/folder", "OMP_NUM_THREADS": "1", "RLHUB_TEST_PLUGIN": "loaded"}
    assert facts == expected
    assert "a line for the log" in (folder / "server-0.log").read_text()


def test_many_calls_run_at_once_from_any_loop_and_keep_their_order_of_sending(actors: list[AsyncActor]) -> None:
    async def many() -> list[int]:
        return await asyncio.gather(*[actors[0].call("meet", value, 50) for value in range(200)])

    for _ in range(2):  # two loops; one after the other they would wait for ever
        assert asyncio.run(asyncio.wait_for(many(), LONG_S)) == list(range(10, 210))


def test_failures_are_typed_and_belong_to_their_call_alone(actors: list[AsyncActor]) -> None:
    call = actors[0].call

    async def main() -> None:
        others = [asyncio.create_task(call("add", value, 0.2)) for value in range(20)]
        with pytest.raises(WorkerError, match=r"\[server-0 rank 0.* bad_row raised DataError: row 3 has no prompt") as found:
            await call("bad_row")
        assert isinstance(found.value.__cause__, DataError) and "in bad_row" in found.value.remote_traceback
        for method, args, words in (
            ("missing", (), "no attribute 'missing'"),
            ("no_pickle", (), "no_pickle raised TypeError"),
            ("give_up", (), "give_up was cancelled from within"),
            ("add", (Unreadable(),), "raised FileNotFoundError"),
        ):
            with pytest.raises(WorkerError, match=words):
                await call(method, *args)
        with pytest.raises(TypeError, match="pickle"):
            await call("add", open(os.devnull, "rb"))  # noqa: SIM115
        with pytest.raises(DeadlineError, match="server-0.add: not done after 0.05 s"):
            await call("add", 1, 10 * LONG_S, deadline_s=0.05)
        assert await asyncio.gather(*others) == list(range(10, 30))
        while await call("running"):
            await asyncio.sleep(0.01)
        calling = asyncio.create_task(call("add", 2, 10 * LONG_S))
        while not await call("running"):
            await asyncio.sleep(0.01)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        while (await call("cancellations"))[-1:] != [2]:  # perhaps after 1, if that had begun
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), LONG_S))


def test_the_task_runner_works_over_them(actors: list[AsyncActor]) -> None:
    runner = ActorTaskRunner(actors, max_concurrent=200)
    try:
        ids = [runner.submit("add", value, 0.001) for value in range(500)]
        found = {outcome.task_id: outcome for outcome in runner.wait(500, timeout=LONG_S)}
        assert found == {task: Accepted(task_id=task, value=10 + value) for value, task in enumerate(ids)}
        late, stopped = runner.submit("add", 7, LONG_S, deadline=0.05), runner.submit("add", 8, LONG_S)
        assert until(lambda: sum(runner.loads.values()) >= 1)
        runner.pause()
        waiting = runner.submit("add", 9)
        assert runner.cancel(stopped)
        ended = {outcome.task_id: outcome for outcome in runner.wait(2, timeout=LONG_S)}
        assert ended == {late: TimedOut(task_id=late, deadline_s=0.05), stopped: Cancelled(task_id=stopped)}
        runner.resume()
        assert runner.wait(1, timeout=LONG_S) == [Accepted(task_id=waiting, value=19)]
    finally:
        runner.close()


def test_a_death_fails_what_is_under_way_with_the_logs_end_and_takes_its_children_along(
    actors: list[AsyncActor], folder: Path
) -> None:
    doomed = start_async_actor(ClassWithInitArgs(RayServer, 0), options(folder, 7))
    runner = ActorTaskRunner([doomed, actors[1]])

    async def main() -> int:
        ending = asyncio.create_task(doomed.until_ended())
        child = await doomed.call("start_child")
        calling = asyncio.create_task(doomed.call("add", 1, LONG_S))
        while not await doomed.call("running"):
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerDiedError, match=r"(?s)\[server-7 .*while or before it ran die.*last words"):
            await doomed.call("die")
        with pytest.raises(WorkerDiedError, match="ran add"):
            await calling
        await asyncio.wait_for(ending, LONG_S)
        assert doomed.ended
        with pytest.raises(WorkerDiedError):
            await doomed.call("add", 1)
        return int(child)

    try:
        child = asyncio.run(asyncio.wait_for(main(), LONG_S))
        for value in range(4):
            runner.submit("add", value)
        assert {type(outcome) for outcome in runner.wait(4, timeout=LONG_S)} == {Accepted}  # the other actor does it
        assert until(lambda: not alive(child))
    finally:
        runner.close()
        doomed.kill()


def test_what_cannot_start_says_why_and_leaves_nothing(ray_cluster: None) -> None:
    with pytest.raises(WorkerError, match=r"\[model rank 0.* __init__ raised ValueError: no such model"):
        start_async_actor(ClassWithInitArgs(RayServer, 1, fail=True), AsyncActorOptions(name="model", start_deadline_s=300.0))
    with pytest.raises(ConfigError, match="not override RANK"):
        start_async_actor(ClassWithInitArgs(RayServer, 1), AsyncActorOptions(name="model", worker_env={"RANK": "3"}))
    with pytest.raises(DeadlineError, match="model.start"):
        start_async_actor(ClassWithInitArgs(RayServer, 1), AsyncActorOptions(name="model", num_cpus=1000, start_deadline_s=0.5))


DRIVER = """
import asyncio, sys, time
from rlhub.single_controller import AsyncActorOptions, ClassWithInitArgs, start_async_actor
from rlhub.single_controller.ray import cluster, connect
from tests.integration.test_async_actors import RayServer

cluster.START_ATTEMPTS = 10
connect({"object_store_memory": 100 * 2**20}, device="cpu", num_ranks=1, deadline_s=600.0)
actor = start_async_actor(ClassWithInitArgs(RayServer, 1), AsyncActorOptions(name="server"))
print(asyncio.run(actor.call("facts"))["pid"], flush=True)
asyncio.run(actor.call("add", 1, 600.0))
"""


def test_the_process_ends_when_the_driver_is_killed() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        pid = int(driver.stdout.readline())
        assert alive(pid)
        os.kill(driver.pid, signal.SIGKILL)
        assert until(lambda: not alive(pid))
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


def test_failed_tasks_say_which_actor(actors: list[AsyncActor]) -> None:
    runner = ActorTaskRunner(actors[:1])
    try:
        runner.submit("bad_row")
        (outcome,) = runner.wait(1, timeout=LONG_S)
        assert isinstance(outcome, Failed) and "[server-0 rank 0" in str(outcome.error)
    finally:
        runner.close()
