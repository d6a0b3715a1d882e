"""Environments in real Ray actors: many at once, killed processes and actors, and nothing left of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rlhub.agents.remote.environment_actors import EnvironmentActorOptions, EnvironmentActors, environment_actor_starter
from rlhub.envs.base import EnvDiedError, ImageObservation, StepEnvironment
from rlhub.envs.source import EnvironmentSource, EnvironmentSpec, LocalEnvironmentSource
from tests.support.processes import all_end

logger = logging.getLogger(__name__)

WAIT_S = 300.0
EPISODES, STEPS = 50, 10
SIMULATORS = """
import asyncio, os

from rlhub.envs.base import StepEnvironment


class Waiting(StepEnvironment):
    running = most = 0
    def __init__(self, together=1):
        self.together = together
    async def reset(self, *, seed=None, options=None):
        return "go", {}
    async def step(self, action):
        Waiting.running += 1
        Waiting.most = max(Waiting.most, Waiting.running)
        while Waiting.most < self.together:  # one after the other they would wait for ever
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        Waiting.running -= 1
        return f"{os.getpid()} {Waiting.most}", 1.0, False, False, {}
    async def close(self):
        pass


class Counts:
    def reset(self, *, seed, options):
        self.count = seed
        return f"{os.getpid()}", {}
    def step(self, action):
        if action == "die":
            os._exit(3)
        self.count += 1
        return f"{self.count}", 1.0, False, False, {}
    def get_state(self):
        return self.count
    def load_state(self, state):
        self.count = state
    def close(self):
        pass
"""


def within(folder: Path, play: Callable[[EnvironmentActors], Awaitable[None]]) -> None:
    """With two actors, of which and of whose processes nothing is left."""
    options = EnvironmentActorOptions(folder=str(folder), log_dir=str(folder / "logs"))
    (folder / "simulators.py").write_text(SIMULATORS)

    async def main() -> None:
        pool = EnvironmentActors(environment_actor_starter(options), 2, idle_s=60.0)
        await pool.start()
        try:
            await play(pool)
            hosted = pids_of(pool)
            started.extend([*hosted, *(child.pid for pid in hosted for child in psutil.Process(pid).children(recursive=True))])
        finally:
            await pool.close()

    started: list[int] = []
    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert len(started) >= 3, "two actors, and processes of theirs"
    assert all_end(started)


def pids_of(pool: EnvironmentActors) -> list[int]:
    return [member.actor.worker.pid for member in pool.members]  # type: ignore[attr-defined]


async def play_one(source: EnvironmentSource, spec: EnvironmentSpec, number: int) -> set[str]:
    async with source.lease(spec, str(number)) as environment:
        assert isinstance(environment, StepEnvironment)
        await environment.reset(seed=number)
        return {str((await environment.step("go"))[0]) for _ in range(STEPS)}


async def rate(source: EnvironmentSource, spec: EnvironmentSpec) -> tuple[float, set[str]]:
    """Episodes a second, and what was seen."""
    began = time.monotonic()
    seen = await asyncio.gather(*(play_one(source, spec, number) for number in range(EPISODES)))
    return EPISODES / (time.monotonic() - began), {text for found in seen for text in found}


async def walked(source: EnvironmentSource, seed: int) -> list[Any]:
    """A walk by sight in a pool."""
    spec = EnvironmentSpec(name="grid_walk", settings={"size": 30, "images": True}, num_workers=1)
    async with source.lease(spec, str(seed)) as environment:
        assert isinstance(environment, StepEnvironment)
        seen = [(await environment.reset(seed=seed))[0], *[(await environment.step(way))[0] for way in ("up", "left", "up")]]
    assert all(isinstance(one, ImageObservation) and one.pixels.shape == (240, 240, 3) for one in seen)
    return [(one.text, one.pixels.tobytes()) for one in seen if isinstance(one, ImageObservation)]


def test_environments_elsewhere_are_the_same_and_many_at_once(ray_cluster: None, tmp_path: Path) -> None:
    async def play(pool: EnvironmentActors) -> None:
        spec, own = EnvironmentSpec(name=f"{tmp_path / 'simulators.py'}:Waiting"), LocalEnvironmentSource()
        try:
            here, _ = await rate(own, spec)
            there, seen = await rate(pool, replace(spec, settings={"together": EPISODES // 2}))
            logger.info("%d at once: %.0f a second in actors, %.0f in process, %.2fx", EPISODES, there, here, there / here)
            assert {int(text.split()[0]) for text in seen} == set(pids_of(pool))
            assert max(int(text.split()[1]) for text in seen) == EPISODES // 2, "all of a actor's step at the same time"
            first = await walked(own, 3)
            assert await walked(pool, 3) == first != await walked(pool, 4)
        finally:
            await own.aclose()

    within(tmp_path, play)


def test_a_killed_process_and_a_killed_host_cost_their_own_episodes(ray_cluster: None, tmp_path: Path) -> None:
    spec = EnvironmentSpec(name="simulators.py:Counts", num_workers=2)

    async def failed(step: Awaitable[Any]) -> EnvDiedError:
        try:
            await step
        except EnvDiedError as error:
            return error
        raise AssertionError("it lives")

    async def play(pool: EnvironmentActors) -> None:
        leases = [pool.lease(spec, str(number)) for number in range(4)]
        found = [await lease.__aenter__() for lease in leases]
        one, two, three, four = (environment for environment in found if isinstance(environment, StepEnvironment))
        begun = [await environment.reset(seed=10) for environment in (one, two, three, four)]
        simulators = [int(str(pid)) for pid, _ in begun]
        above = [{parent.pid for parent in psutil.Process(pid).parents()} for pid in simulators]
        parents = [pid for pids in above for pid in pids_of(pool) if pid in pids]
        assert parents == [*pids_of(pool)] * 2
        assert "exit code 3" in str(await failed(one.step("die")))
        assert [(await environment.step("go"))[0] for environment in (two, three)] == ["11", "11"]
        os.kill(parents[1], signal.SIGKILL)
        assert "environments-" in str(await failed(two.step("go"))) and "has died" in str(await failed(four.step("go")))
        assert (await three.step("go"))[0] == "12", "the other actor goes on"
        for lease in leases:
            await lease.__aexit__(None, None, None)
        while len(pool.members) < 2:
            await asyncio.sleep(0.02)
        assert pool.counts == {"deaths": 1, "restarts": 1}
        assert all_end([parents[1], simulators[0], simulators[1], simulators[3]])
        await asyncio.gather(*(play_one(pool, spec, number) for number in range(8)))
        await check_states(pool)

    async def check_states(pool: EnvironmentActors) -> None:
        states = await pool.get_state(spec)
        assert sorted(map(len, states)) == [2, 2] and any(state is not None for member in states for state in member)
        changed = [[100 + place if state is not None else None for place, state in enumerate(member)] for member in states]
        await pool.load_state(spec, changed)
        assert await pool.get_state(spec) == changed
        status = (await pool.status()).values()
        assert sum(one.leased for one in status) == 0 and sum(one.replaced for one in status) == 1

    within(tmp_path, play)


def test_pixels_are_not_written_as_text(ray_cluster: None, tmp_path: Path) -> None:
    """Between an actor and its caller a picture takes the bytes that it has."""
    from rlhub.single_controller.ray.async_actor import pack

    picture = ImageObservation(pixels=np.zeros((240, 240, 3), np.uint8))
    assert len(pack((picture, {}))) < picture.pixels.nbytes + 2000
