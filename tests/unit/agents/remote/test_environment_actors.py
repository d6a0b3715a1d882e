"""Environments in actors of the local backend: what episodes meet there, and what of a actor's troubles they notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from rlhub.agents.remote.environment_actors import EnvironmentActorOptions, EnvironmentActors, environment_actor_starter
from rlhub.agents.remote.episode_actor import EpisodeActorSettings, WorkflowKey
from rlhub.agents.remote.workflow import EpisodeActorOptions, EpisodeActors, RemoteWorkflow, episode_actor_starter
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import build_workflow
from rlhub.engines.rollout.base import SamplingParams
from rlhub.envs.base import EnvDiedError, EnvError, EnvironmentLimits, ImageObservation, StepEnvironment
from rlhub.envs.source import EnvironmentSpec
from rlhub.errors import DeadlineError, LoadError, WorkerDiedError, WorkflowError
from tests.support.episode_parts import ScriptedEngine, episode, parts, tokenizer
from tests.unit.agents.remote.environments import HERE, Shop, Waiting

START = environment_actor_starter(EnvironmentActorOptions(backend="local"))
LIMIT_S = 60.0
"""Nothing here takes so long, unless it hangs."""
WAITING = EnvironmentSpec(name=f"{HERE}Waiting")


def within(
    play: Callable[[EnvironmentActors], Awaitable[Any]],
    *,
    num_actors: int = 1,
    restarts: int = 1,
    idle_s: float = 60.0,
    start: Any = START,
    shutdown_s: float = 60.0,
) -> Any:
    """With actors that are left without a lease."""

    async def main() -> Any:
        pool = EnvironmentActors(start, num_actors, idle_s=idle_s, restarts=restarts, shutdown_s=shutdown_s)
        await pool.start()
        try:
            found = await play(pool)
            assert pool.metrics()["rollout/environments_leased"] == 0 or pool.counts["deaths"]
            return found
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


# Equal trajectories, wherever environments and episodes run.

WALK = {"environment": "grid_walk", "environment_kwargs": {"size": 5, "max_steps": 4, "images": True}}
SHOP = {"environment": f"{HERE}Shop", "environment_kwargs": {"stock": 4}}


def buying(count: int) -> str:
    return f'<tool_call>{{"name": "buy", "arguments": {{"item": "tea", "count": {count}}}}}</tool_call>'


REPLIES = {"walk": ["up", "left", "nowhere", "down", "right"], "shop": [buying(9), buying(-1), buying(2), buying(2)]}


def made_by(settings: dict[str, Any], replies: list[str], seed: int, *, in_actors: bool, elsewhere: bool = False) -> Trajectory:
    """The episode's trajectory, with environments in actors or not, and its own code in an episode actor or not."""
    row = episode(extra_info={"env_seed": seed})

    async def play(environments: EnvironmentActors | None) -> Any:
        own = replace(parts(**settings), environments=environments)
        if not elsewhere:
            workflow = build_workflow("environment", own)
            return await workflow.arun_episode(ScriptedEngine(replies=replies), row)
        there = EpisodeActorSettings(
            tokenizer=tokenizer,
            samplings={"training": own.sampling},
            max_prompt_length=own.max_prompt_length,
            max_response_length=own.max_response_length,
            kwargs=settings,
            lends_environments=True,
        )
        episodes = EpisodeActors(episode_actor_starter(there, EpisodeActorOptions(backend="local")), 1)
        await episodes.start()
        try:
            workflow = RemoteWorkflow(own, WorkflowKey("training", "environment"), episodes)
            return await workflow.arun_episode(ScriptedEngine(replies=replies), row)
        finally:
            await episodes.close()

    found = within(play) if in_actors else asyncio.run(play(None))
    for name in [name for name in found.metrics if name.endswith("seconds")]:
        del found.metrics[name]
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(("settings", "replies"), [(WALK, "walk"), (SHOP, "shop")])
def test_a_trajectory_is_that_of_an_environment_in_the_episodes_own_process(settings: dict[str, Any], replies: str) -> None:
    said = REPLIES[replies]
    here = made_by(settings, said, 3, in_actors=False)
    assert made_by(settings, said, 3, in_actors=True) == here
    assert made_by(settings, said, 3, in_actors=True, elsewhere=True) == here
    assert made_by(settings, said, 4, in_actors=True) != here
    assert len(here.response_ids) > 40


def test_pictures_arrive_as_arrays() -> None:
    async def play(pool: EnvironmentActors) -> Any:
        spec = EnvironmentSpec(name="grid_walk", settings={"size": 3, "images": True})
        async with pool.lease(spec, "3-1") as environment:
            assert isinstance(environment, StepEnvironment)
            return (await environment.reset(seed=1))[0]

    seen = within(play)
    assert isinstance(seen, ImageObservation) and seen.pixels.shape == (24, 24, 3)


# Many at once, and where they go.


async def steps(pool: EnvironmentActors, count: int, session: str = "", spec: EnvironmentSpec = WAITING) -> list[str]:
    async with pool.lease(spec, session) as environment:
        assert isinstance(environment, StepEnvironment)
        observation, info = await environment.reset(seed=len(session))
        assert info == {"seed": len(session)}, "what has no plain form stays there"
        return [str(observation), *[str((await environment.step("go"))[0]) for _ in range(count)]]


def test_one_loop_serves_many_episodes_at_once_and_the_hosts_share_them() -> None:
    Waiting.most = 0

    async def play(pool: EnvironmentActors) -> list[list[str]]:
        episodes = [
            asyncio.create_task(steps(pool, 3, "x" * number, replace(WAITING, settings={"together": 60}))) for number in range(60)
        ]
        await until(lambda: sum(member.episodes for member in pool.members) == 60)
        assert [member.episodes for member in pool.members] == [30, 30]
        status = await pool.status()
        assert sum(found.leased for found in status.values()) <= 60 and set(status) == {"environments-0", "environments-1"}
        return list(await asyncio.gather(*episodes))

    found = within(play, num_actors=2)
    assert found == [[f"seed {number}", "go 1", "go 2", "go 3"] for number in range(60)]
    assert Waiting.most == 60 and Waiting.open == 0


class Places:
    """An actor with places whose leases are noted."""

    def __init__(self, name: str) -> None:
        self.name, self.ended = name, False
        self.asked: list[tuple[str, Any]] = []
        self._end = asyncio.Event()

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        if self.ended:
            raise WorkerDiedError("it was killed", role=self.name, rank=0)
        self.asked.append((method, args[0] if args else None))
        return "seen"

    async def until_ended(self) -> None:
        await self._end.wait()

    def kill(self) -> None:
        self.ended = True
        self._end.set()


async def start_places(name: str) -> Any:
    return Places(name)


def test_leases_wait_in_their_order_for_a_place() -> None:
    """Also where some leave the queue, and where a actor dies and comes back."""
    spec, began, goes_on = replace(WAITING, num_workers=2), [], asyncio.Event()

    async def one(pool: EnvironmentActors, number: int) -> None:
        async with pool.lease(spec, str(number)):
            began.append(number)
            await goes_on.wait()

    async def play(pool: EnvironmentActors) -> None:
        tasks = [asyncio.create_task(one(pool, number)) for number in range(12)]
        await until(lambda: began == [0, 1, 2, 3])
        assert [member.episodes for member in pool.members] == [2, 2]
        tasks[4].cancel()  # it waits
        tasks[1].cancel()  # it has a place
        await until(lambda: began == [0, 1, 2, 3, 5])
        pool.lost(pool.members[0], "killed by the test")
        await until(lambda: began == [0, 1, 2, 3, 5, 6, 7])  # in the new one
        goes_on.set()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends if end] == [asyncio.CancelledError] * 2
        assert began == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11] and [member.episodes for member in pool.members] == [0, 0]
        assert pool.counts == {"deaths": 1, "restarts": 1}

    within(play, num_actors=2, start=start_places)


def test_a_place_that_is_handed_to_one_who_leaves_goes_to_the_next() -> None:
    async def play(pool: EnvironmentActors) -> None:
        spec = replace(WAITING, num_workers=1)
        first = pool.lease(spec, "first")
        await first.__aenter__()
        second = asyncio.create_task(pool.lease(spec, "second").__aenter__())
        await asyncio.sleep(0.01)
        await first.__aexit__(None, None, None)
        second.cancel()  # before it has noticed that it has the place
        with pytest.raises(asyncio.CancelledError):
            await second
        async with asyncio.timeout(LIMIT_S), pool.lease(spec, "third"):
            pass

    within(play, start=start_places)


# Trouble.


def trouble(action: str, limits: EnvironmentLimits) -> Any:
    """An episode that ends with an error, and one after it in the same actor."""

    async def play(pool: EnvironmentActors) -> None:
        spec = replace(WAITING, limits=limits)
        actor = pool.members[0].actor
        try:
            async with pool.lease(spec, "3-1") as environment:
                assert isinstance(environment, StepEnvironment)
                await environment.reset(seed=1)
                await environment.step(action)
        finally:
            assert await steps(pool, 1) == ["seed 0", "go 1"] and pool.members[0].actor is actor
            await until(lambda: Waiting.open == 0)

    return within(play)


def test_what_an_environment_raises_and_a_passed_deadline_are_the_episodes_own() -> None:
    with pytest.raises(EnvError, match="step: ValueError: no such move"):
        trouble("raise", EnvironmentLimits())
    with pytest.raises(DeadlineError, match="environment step"):
        trouble("hang", EnvironmentLimits(step_timeout_s=0.05))
    with pytest.raises(LoadError):
        within(lambda pool: steps(pool, 1, spec=replace(WAITING, name="nowhere.py:X")))


def test_a_killed_host_fails_its_episodes_and_another_takes_its_place() -> None:
    async def play(pool: EnvironmentActors) -> None:
        spec = replace(WAITING, settings={"together": 5})  # one more than there are: they wait until we say that there were
        Waiting.most = 0
        episodes = [asyncio.create_task(steps(pool, 3, spec=spec)) for _ in range(4)]
        await until(lambda: Waiting.running == 4)
        first = pool.members[0]  # in the order in which they were up; it got the first lease, the other the second
        first.actor.kill()
        ends = await asyncio.gather(*episodes[::2], return_exceptions=True)
        assert all(type(end) is EnvDiedError and f"{first.name} has died" in str(end) for end in ends)
        await until(lambda: len(pool.members) == 2)
        assert not episodes[1].done() and not episodes[3].done(), "those in the other actor go on"
        assert sorted(member.episodes for member in pool.members) == [0, 2]
        assert await steps(pool, 1) == ["seed 0", "go 1"]
        assert pool.counts == {"deaths": 1, "restarts": 1}
        Waiting.most = 5
        assert await asyncio.gather(*episodes[1::2]) == [["seed 0", "go 1", "go 2", "go 3"]] * 2

    within(play, num_actors=2)


def test_without_hosts_nobody_waits_for_ever() -> None:
    async def play(pool: EnvironmentActors) -> None:
        spec = replace(WAITING, num_workers=1)
        async with pool.lease(spec, "first"):
            second = asyncio.create_task(pool.lease(spec, "second").__aenter__())
            await asyncio.sleep(0.01)
            pool.members[0].actor.kill()
            with pytest.raises(WorkflowError, match="all 1 environment actors have died"):
                await second
        with pytest.raises(WorkflowError, match="have died"):
            await steps(pool, 1)

    within(play, restarts=0, start=start_places)


@pytest.mark.parametrize(("closing", "left"), [(0.5, 0), (3600.0, 1)])
def test_what_was_just_given_back_has_its_time_to_close(closing: float, left: int) -> None:
    """The control is an environment whose close hangs: it does not hold the end up."""

    async def play(pool: EnvironmentActors) -> None:
        await steps(pool, 1, spec=replace(WAITING, settings={"closing": closing}))
        await until(lambda: Waiting.ending == 1)

    Waiting.open = Waiting.ending = 0
    within(play, shutdown_s=0.5 if left else 60.0)
    assert Waiting.open == left
    Waiting.open = 0


def test_a_lease_that_nobody_uses_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow step is use.  The clock of the driver's loop is put forward."""

    async def pass_time(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + seconds)
        await asyncio.sleep(0.001)  # which ends after what has become due

    async def play(pool: EnvironmentActors) -> None:
        async with pool.lease(WAITING, "3-1") as environment:
            assert isinstance(environment, StepEnvironment)
            await environment.reset()
            stepping = asyncio.create_task(environment.step("hang"))
            await until(lambda: Waiting.running == 1)
            await pass_time(13.0)
            assert not stepping.done() and pool.counts["taken_back"] == 0
            stepping.cancel()
            await asyncio.wait([stepping])
            await pass_time(6.0)
            await environment.step("go")
            await pass_time(7.0)
            assert pool.counts["taken_back"] == 0, "it was used 7 s ago"
            await pass_time(7.0)
            assert pool.counts["taken_back"] == 1 and pool.members[0].episodes == 0
            with pytest.raises(EnvDiedError, match=r"episode 3-1 was taken back: it was not used for 12 s"):
                await environment.step("late")
        await until(lambda: Waiting.open == 0)

    within(play, idle_s=12.0)


def test_states_travel_from_one_lease_to_another() -> None:
    async def play(pool: EnvironmentActors) -> list[str]:
        async with pool.lease(WAITING, "a") as first, pool.lease(WAITING, "b") as second:
            assert isinstance(first, StepEnvironment) and isinstance(second, StepEnvironment)
            await first.reset(seed=1)
            await second.reset(seed=1)
            for _ in range(3):
                await first.step("go")
            state = await first.get_state()
            untouched = (await second.step("on"))[0]
            await second.load_state(state)
            return [str(untouched), str((await second.step("on"))[0])]

    assert within(play, num_actors=2) == ["on 1", "on 4"]


def test_an_episode_whose_own_host_dies_gives_its_environment_back() -> None:
    Shop.closed.clear()
    settings = {"environment": f"{HERE}Shop"}

    class Never:
        waiting = 0

        async def agenerate(self, request: Any, params: SamplingParams) -> Any:
            Never.waiting += 1
            await asyncio.Event().wait()

    async def play(pool: EnvironmentActors) -> None:
        own = replace(parts(**settings), environments=pool)
        there = EpisodeActorSettings(
            tokenizer=tokenizer,
            samplings={"training": own.sampling},
            max_prompt_length=2000,
            max_response_length=2000,
            kwargs=settings,
            lends_environments=True,
        )
        episodes = EpisodeActors(episode_actor_starter(there, EpisodeActorOptions(backend="local")), 1, restarts=0)
        await episodes.start()
        workflow = RemoteWorkflow(own, WorkflowKey("training", "environment"), episodes)
        running = asyncio.create_task(workflow.arun_episode(Never(), episode()))
        await until(lambda: Never.waiting == 1)
        assert pool.members[0].episodes == 1 and Shop.closed == []
        episodes.members[0].actor.kill()
        with pytest.raises(WorkflowError, match="all 1 episode actors have died"):
            await running
        await until(lambda: Shop.closed == [3])
        assert (await pool.status())["environments-0"].leased == 0
        await episodes.close()

    within(play)
