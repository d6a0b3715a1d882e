"""Simulators in processes: what they do, how they end, and what of it the others notice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhub.agents.workflows.base import build_workflow
from rlhub.envs.base import EnvDiedError, EnvError, EnvironmentLimits, ImageObservation
from rlhub.envs.registry import environment_target
from rlhub.envs.source import EnvironmentPool
from rlhub.errors import DeadlineError, LoadError
from tests.support.episode_parts import ScriptedEngine, episode, parts

SIMULATOR = """
import glob, os, time

class Trouble:
    def __init__(self):
        self.count = 0
    def reset(self, *, seed, options):
        self.count = 0
        return f"pid {os.getpid()}", {"pid": os.getpid(), "odd": object()}
    def step(self, action):
        self.count += 1
        if action == "die":
            os._exit(3)
        if action == "hang":
            open(f"{__file__}.hangs", "w").close()
            time.sleep(600)
        if action == "meet":  # four at the same time
            open(f"{__file__}.{os.getpid()}.met", "w").close()
            while len(glob.glob(f"{__file__}.*.met")) < 4:
                time.sleep(0.01)
        if action == "raise":
            raise ValueError("no such move")
        if action == "eat":
            self.fat = bytearray(10**11)
        return f"{action} {self.count}", 0.5, False, False, {}
    def get_state(self):
        return {"count": self.count}
    def load_state(self, state):
        self.count = state["count"]
    def close(self):
        pass
"""


@pytest.fixture
def trouble(tmp_path: Path) -> str:
    (tmp_path / "trouble.py").write_text(SIMULATOR)
    return f"{tmp_path / 'trouble.py'}:Trouble"


def with_pool(
    use: Callable[[EnvironmentPool], Awaitable[Any]],
    target: str,
    *,
    num_workers: int = 1,
    limits: EnvironmentLimits | None = None,
    **settings: Any,
) -> Any:
    async def run() -> Any:
        pool = EnvironmentPool(target, settings, num_workers=num_workers, limits=limits)
        try:
            return await use(pool)
        finally:
            await pool.aclose()
            assert pool.num_alive == 0

    return asyncio.run(run())


def test_every_way_to_fail_is_a_typed_error_and_the_next_episode_has_a_simulator(trouble: str) -> None:
    limits = EnvironmentLimits()
    own_s = limits.step_timeout_s

    async def use(pool: EnvironmentPool) -> None:
        pids = []
        for action, error, stays in (
            ("raise", EnvError, True),
            ("die", EnvDiedError, False),
            ("hang", DeadlineError, False),
            ("eat", EnvDiedError, False),
        ):
            async with pool.lease() as environment:
                _, info = await environment.reset(seed=1)
                pids.append(info["pid"])
                assert info.keys() == {"pid"} and (await environment.step("go"))[0] == "go 1"
                limits.step_timeout_s = 0.5 if action == "hang" else own_s  # no other step can be too slow
                with pytest.raises(error) as caught:
                    await environment.step(action)
                assert type(caught.value) is error
                limits.step_timeout_s = own_s
                if stays:
                    assert (await environment.step("on"))[0] == "on 3"
                else:
                    with pytest.raises(EnvDiedError):
                        await environment.step("on")
                    assert not psutil.pid_exists(info["pid"])
        assert pids[0] == pids[1] and len(set(pids)) == 3 and pool.num_replaced == 2

    with_pool(use, trouble, limits=limits)


def test_a_process_killed_from_outside_costs_its_own_episode_only(trouble: str) -> None:
    async def one(pool: EnvironmentPool, victim: bool) -> str:
        async with pool.lease() as environment:
            _, info = await environment.reset()
            try:
                for turn in range(3):
                    if victim and turn == 1:
                        os.kill(info["pid"], signal.SIGKILL)
                    await environment.step("go")
            except EnvDiedError as error:
                return f"died: {'SIGKILL' in str(error)}"
            return "whole"

    async def use(pool: EnvironmentPool) -> list[str]:
        ends = list(await asyncio.gather(one(pool, True), one(pool, False)))
        return [*ends, await one(pool, False), await one(pool, False)]

    assert with_pool(use, trouble, num_workers=2) == ["died: True", "whole", "whole", "whole"]


def test_processes_work_at_the_same_time_and_no_more_than_there_are(trouble: str) -> None:
    running = [0, 0]

    async def one(pool: EnvironmentPool) -> None:
        async with pool.lease() as environment:
            running[0] += 1
            running[1] = max(running)
            await environment.reset()
            await environment.step("meet")  # one after the other they would wait for ever
            running[0] -= 1

    async def use(pool: EnvironmentPool) -> None:
        await asyncio.gather(*(one(pool) for _ in range(6)))

    with_pool(use, trouble, num_workers=4)
    assert running == [0, 4]


def test_a_cancelled_call_does_not_answer_the_next_one(trouble: str, tmp_path: Path) -> None:
    under_way = tmp_path / "trouble.py.hangs"

    async def use(pool: EnvironmentPool) -> str:
        async with pool.lease() as environment:
            await environment.reset()
            call = asyncio.create_task(environment.step("hang"))
            while not under_way.exists():
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        async with pool.lease() as environment:
            await environment.reset()
            return (await environment.step("now"))[0]

    assert with_pool(use, trouble) == "now 1"


def test_states_are_saved_and_loaded_into_another_pool(trouble: str) -> None:
    async def play(pool: EnvironmentPool) -> list[Any]:
        async with pool.lease() as environment:
            await environment.reset()
            for _ in range(3):
                await environment.step("go")
            own = await environment.get_state()
        return [own, await pool.get_state()]

    own, states = with_pool(play, trouble, num_workers=2)
    assert own == {"count": 3} and states == [{"count": 3}, None]

    async def go_on(pool: EnvironmentPool) -> str:
        await pool.load_state(states)
        async with pool.lease() as environment:
            return (await environment.step("on"))[0]

    assert with_pool(go_on, trouble, num_workers=2) == "on 4"
    with pytest.raises(ValueError, match="states of 2 processes, but the pool has 1"):
        with_pool(go_on, trouble)


def test_images_come_through_the_pipe() -> None:
    async def use(pool: EnvironmentPool) -> Any:
        async with pool.lease() as environment:
            return (await environment.reset(seed=1))[0], (await environment.step("up"))[0]

    for seen in with_pool(use, environment_target("grid_walk"), images=True, size=20):
        assert isinstance(seen, ImageObservation) and seen.pixels.shape == (160, 160, 3) and seen.pixels.dtype == np.uint8


@pytest.mark.parametrize(("target", "settings"), [("nowhere.py:X", {}), ("trouble", {"speed": 1})])
def test_a_simulator_that_cannot_be_made_is_a_load_error(trouble: str, target: str, settings: dict[str, Any]) -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.lease():
            pass

    with pytest.raises(LoadError, match="environment "):
        with_pool(use, trouble if target == "trouble" else target, **settings)


def test_episodes_use_the_pool() -> None:
    settings = {"environment": "guess_number", "environment_kwargs": {"largest": 9}, "num_env_workers": 2}
    workflow = build_workflow("environment", parts(**settings))

    async def all_of_them() -> list[float]:
        rows = [episode(extra_info={"env_options": {"number": number}}) for number in range(1, 7)]
        engines = [ScriptedEngine(replies=["9", str(number)]) for number in range(1, 7)]
        try:
            found = await asyncio.gather(*(workflow.arun_episode(*pair) for pair in zip(engines, rows, strict=True)))
        finally:
            await workflow.aclose()
        return [sum(trajectory.rewards or []) for trajectory in found if trajectory is not None]

    assert asyncio.run(all_of_them()) == [1.0] * 6
