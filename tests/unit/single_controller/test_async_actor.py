"""Asynchronous actors in process, and the task runner over a pool of actors."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlhub.errors import ConfigError, DataError, DeadlineError, ResourceError, WorkerDiedError, WorkerError
from rlhub.single_controller import (
    ActorTaskRunner,
    AsyncActor,
    AsyncActorOptions,
    ClassWithInitArgs,
    astart_async_actor,
    start_async_actor,
)
from rlhub.single_controller.ray.async_actor import CANCEL, ActorProcess
from rlhub.utils.aio.results import Accepted, Cancelled, Failed, TimedOut
from tests.support.hosted import Server

LONG_S = 60.0


class LocalServer(Server):
    def where(self) -> tuple[str, str]:
        return self.context.role, threading.current_thread().name


def start(name: str = "server", **options: Any) -> AsyncActor:
    return start_async_actor(ClassWithInitArgs(LocalServer, 10), AsyncActorOptions(name=name, **options), backend="local")


@pytest.fixture
def actor() -> Iterator[AsyncActor]:
    actor = start()
    yield actor
    actor.kill()


def test_calls_from_any_loop_run_at_the_same_time_on_the_actors_own(actor: AsyncActor) -> None:
    async def many() -> list[int]:
        return await asyncio.gather(*[actor.call("meet", value, 20) for value in range(20)])

    assert asyncio.run(many()) == list(range(10, 30))
    assert asyncio.run(many()) == list(range(10, 30))  # another loop
    assert asyncio.run(actor.call("where")) == ("server", "server")
    assert asyncio.run(actor.call("__getattribute__", "most")) == 20


def test_errors_are_typed_and_name_the_actor(actor: AsyncActor) -> None:
    async def main() -> None:
        with pytest.raises(WorkerError, match=r"\[server rank 0.* bad_row raised DataError: row 3 has no prompt") as found:
            await actor.call("bad_row")
        assert isinstance(found.value.__cause__, DataError) and found.value.remote_type == "DataError"
        with pytest.raises(WorkerError, match="no attribute 'missing'"):
            await actor.call("missing")
        with pytest.raises(WorkerError, match="give_up was cancelled from within"):
            await actor.call("give_up")
        with pytest.raises(DeadlineError, match="server.add: not done after 0.02 s"):
            await actor.call("add", 1, LONG_S, deadline_s=0.02)
        await until_running([actor], 0)
        calling = asyncio.create_task(actor.call("add", 2, LONG_S))
        await until_running([actor], 1)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert await actor.call("add", 3) == 13
        assert (await actor.call("__getattribute__", "cancelled"))[-1:] == [2]  # perhaps after 1, if that had begun
        await until_running([actor], 0)

    asyncio.run(main())


def test_a_killed_actor_fails_calls_under_way_and_later_ones(actor: AsyncActor) -> None:
    async def main() -> None:
        calling, ending = asyncio.create_task(actor.call("add", 1, LONG_S)), asyncio.create_task(actor.until_ended())
        await until_running([actor], 1)
        assert not ending.done() and not actor.ended
        actor.kill()
        actor.kill()
        with pytest.raises(WorkerDiedError, match=r"\[server .* ended while or before it ran add"):
            await calling
        await asyncio.wait_for(ending, LONG_S)
        assert actor.ended
        with pytest.raises(WorkerDiedError):
            await actor.call("add", 1)

    asyncio.run(main())


def test_at_most_max_concurrency_calls_run() -> None:
    actor = start(max_concurrency=3)

    async def main() -> int:
        await asyncio.gather(*[actor.call("meet", value, 3) for value in range(10)])
        return int(await actor.call("__getattribute__", "most"))

    try:
        assert asyncio.run(main()) == 3
    finally:
        actor.kill()


def test_what_cannot_start_says_why() -> None:
    broken = ClassWithInitArgs(LocalServer, 1, fail=True)
    with pytest.raises(WorkerError, match=r"\[model rank 0.* __init__ raised ValueError: no such model"):
        start_async_actor(broken, AsyncActorOptions(name="model"), backend="local")
    with pytest.raises(WorkerError, match="no such model"):
        asyncio.run(astart_async_actor(broken, AsyncActorOptions(name="model"), backend="local"))
    with pytest.raises(ConfigError, match="no backend 'thread'; known: ray, local"):
        start_async_actor(broken, AsyncActorOptions(name="model"), backend="thread")  # type: ignore[arg-type]
    for thread in threading.enumerate():
        if thread.name == "model":
            thread.join(LONG_S)
            assert not thread.is_alive()


def test_tasks_go_to_the_least_loaded_actor_and_actors_come_and_go() -> None:
    actors = [start(f"server-{number}") for number in range(3)]
    runner = ActorTaskRunner(actors[:2], max_concurrent=4)
    try:
        for value in range(4):
            runner.submit("add", value, seconds=LONG_S, task_id=str(value))
        asyncio.run(until_running(actors, 4))
        assert runner.loads == {"server-0": 2, "server-1": 2}
        for value in range(4):
            runner.cancel(str(value))
        assert runner.wait(4, timeout=LONG_S) == [Cancelled(task_id=str(value)) for value in range(4)]
        assert asyncio.run(actors[0].call("__getattribute__", "cancelled")) == [0, 2]
        runner.add_actor(actors[2])
        runner.remove_actor("server-0")
        late = runner.submit("add", 1, LONG_S, deadline=0.02)
        good = runner.submit("add", 1)
        ended = {outcome.task_id: outcome for outcome in runner.wait(2, timeout=LONG_S)}
        assert ended == {late: TimedOut(task_id=late, deadline_s=0.02), good: Accepted(task_id=good, value=11)}
        assert runner.loads == {"server-1": 0, "server-2": 0}
    finally:
        runner.close()
        for actor in actors:
            actor.kill()


def test_an_actor_that_died_gets_no_more_tasks_and_with_none_left_tasks_fail() -> None:
    actors = [start("server-0"), start("server-1")]
    runner = ActorTaskRunner(actors)
    try:
        runner.submit("add", 1, LONG_S)
        asyncio.run(until_running(actors, 1))
        actors[0].kill()
        (outcome,) = runner.wait(1, timeout=LONG_S)
        assert isinstance(outcome, Failed) and isinstance(outcome.error, WorkerDiedError)
        for value in range(5):
            runner.submit("add", value)
        assert {type(outcome) for outcome in runner.wait(5, timeout=LONG_S)} == {Accepted}
        actors[1].kill()
        runner.submit("add", 1)
        (outcome,) = runner.wait(1, timeout=LONG_S)
        assert isinstance(outcome, Failed) and isinstance(outcome.error, ResourceError)
        runner.submit(asyncio.sleep, 0, "here")  # a coroutine function runs in this process
        (outcome,) = runner.wait(1, timeout=LONG_S)
        assert isinstance(outcome, Accepted) and outcome.value == "here"
    finally:
        runner.close()
        for actor in actors:
            actor.kill()


async def until_running(actors: list[AsyncActor], count: int) -> None:
    """Until so many tasks run in the actors."""
    async with asyncio.timeout(LONG_S):
        while sum([await actor.call("running") for actor in actors]) != count:
            await asyncio.sleep(0.001)


def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing_in_its_process() -> None:
    async def deliver() -> None:
        process = ActorProcess(4)
        await process.build(ClassWithInitArgs(LocalServer, 10))
        request = pickle.dumps(("add", (1,), {}, 0))
        await process.deliver("driver", [(0, request), (0, CANCEL), (1, request)])
        async with asyncio.timeout(LONG_S):
            assert [reply[0] for reply in await process.collect("driver", [])] == [1]
            while process._running:
                await asyncio.sleep(0)

    asyncio.run(deliver())
