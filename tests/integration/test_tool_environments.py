"""Asynchronous environments in processes, here and in Ray actors: what they do, and that a call that hangs there is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhub.agents.remote.environment_actors import EnvironmentActorOptions, EnvironmentActors, environment_actor_starter
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import build_workflow
from rlhub.envs.base import EnvDiedError, EnvError, Environment, EnvironmentLimits, StepEnvironment
from rlhub.envs.source import EnvironmentSource, EnvironmentSpec, LocalEnvironmentSource
from rlhub.errors import DeadlineError, LoadError
from rlhub.utils.tool_calls import ToolResult
from tests.support.episode_parts import ScriptedEngine, episode, parts, tokenizer
from tests.unit.agents.remote.environments import HERE

WAIT_S = 300.0
"""Nothing here takes so long, unless it hangs."""
ENVIRONMENT = '''
import asyncio, os, threading

from rlhub.envs.base import Environment
from rlhub.tools.base import ToolError
from rlhub.tools.schemas import schema_of


def act(how: str) -> str:
    """Act.

    how: in which way.
    """


class Acting(Environment):
    def __init__(self, folder, broken=False):
        if broken:
            raise ValueError("it is broken")
        self.folder, self.loop, self.count = folder, asyncio.get_running_loop(), 0

    def note(self, what):
        open(f"{self.folder}/{what}.{os.getpid()}", "w").close()

    async def ainitialize(self, *, seed=None, options=None):
        self.note("begun")
        self.beside = asyncio.create_task(asyncio.to_thread(self.note, "beside"))  # goes on between the calls

    async def list_tools(self):
        return [schema_of(act)]

    async def aexecute(self, tool_name, tool_args):
        assert asyncio.get_running_loop() is self.loop
        self.count += 1
        match tool_args["how"]:
            case "hang":
                self.note("hangs")
                await asyncio.to_thread(threading.Event().wait, 600)  # longer than any test waits
            case "die":
                os._exit(3)
            case "late":
                raise TimeoutError("the shop is closed")
            case how:
                return f"{how} {self.count} in {os.getpid()}"

    async def aclose(self):
        self.note("closed")
'''


@pytest.fixture
def spec(tmp_path: Path) -> EnvironmentSpec:
    (tmp_path / "acting.py").write_text(ENVIRONMENT)
    name = f"{tmp_path / 'acting.py'}:Acting"
    return EnvironmentSpec(name=name, settings={"folder": str(tmp_path)}, num_workers=1, offers_tools=True)


def noted(folder: Path, what: str) -> list[int]:
    """Which processes have noted this."""
    return [int(path.suffix[1:]) for path in folder.glob(f"{what}.*") if path.suffix != ".py"]


def all_gone(folder: Path) -> bool:
    """The processes of all environments that began."""
    living = []
    for pid in noted(folder, "begun"):
        with suppress(psutil.NoSuchProcess):
            living.append(psutil.Process(pid))
    return not psutil.wait_procs(living, timeout=WAIT_S)[1]


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def acted(environment: Any, how: str) -> str:
    found = await environment.aexecute("act", {"how": how})
    return str(found.text if isinstance(found, ToolResult) else found)


def own(play: Callable[[LocalEnvironmentSource], Awaitable[None]]) -> None:
    async def main() -> None:
        environments = LocalEnvironmentSource()
        try:
            await play(environments)
        finally:
            await environments.aclose()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


async def hang_and_go_on(source: EnvironmentSource, spec: EnvironmentSpec, folder: Path) -> None:
    """A call that its caller gives up, and the next episode in the same place."""
    async with source.lease(spec, "first") as environment:
        assert isinstance(environment, Environment)
        await environment.ainitialize(seed=1)
        (first,) = noted(folder, "begun")
        assert await acted(environment, "go") == f"go 1 in {first}"
        hanging = asyncio.create_task(environment.aexecute("act", {"how": "hang"}))
        await until(lambda: noted(folder, "hangs"))
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await until(lambda: not psutil.pid_exists(first))  # the thread with it
        with pytest.raises(EnvDiedError):
            await acted(environment, "go")
    async with source.lease(spec, "second") as environment:
        assert isinstance(environment, Environment)
        await environment.ainitialize(seed=1)
        (second,) = {*noted(folder, "begun")} - {first}
        assert await acted(environment, "go") == f"go 1 in {second}", "another process, and all begins anew"
    await until(lambda: noted(folder, "closed") == [second])
    async with source.lease(spec, "third") as environment:
        assert await acted(environment, "go") == f"go 1 in {second}", "the same process, and another environment"


def test_a_call_that_hangs_is_ended_and_the_next_episode_has_an_environment(spec: EnvironmentSpec, tmp_path: Path) -> None:
    own(lambda source: hang_and_go_on(source, spec, tmp_path))


def test_in_an_actor_too_and_the_actor_lives(ray_cluster: None, spec: EnvironmentSpec, tmp_path: Path) -> None:
    options = EnvironmentActorOptions(folder=str(tmp_path), log_dir=str(tmp_path / "logs"))

    async def main() -> None:
        pool = EnvironmentActors(environment_actor_starter(options), 1, idle_s=WAIT_S)
        await pool.start()
        try:
            actor = pool.members[0].actor
            await hang_and_go_on(pool, spec, tmp_path)
            assert pool.members[0].actor is actor and not pool.counts
            while (status := (await pool.status())["environments-0"]).leased:  # given back without waiting for its end
                await asyncio.sleep(0.005)
            assert (status.alive, status.replaced) == (1, 1)
            for pid in noted(tmp_path, "closed"):
                assert actor.worker.pid in [parent.pid for parent in psutil.Process(pid).parents()]  # type: ignore[attr-defined]
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert all_gone(tmp_path)


def test_every_way_to_fail_is_a_typed_error(spec: EnvironmentSpec, tmp_path: Path) -> None:
    limits = EnvironmentLimits(step_timeout_s=0.05)  # for what never ends

    async def play(source: LocalEnvironmentSource) -> None:
        with pytest.raises(DeadlineError, match="environment aexecute"):
            async with source.lease(replace(spec, limits=limits), "hangs") as environment:
                await environment.ainitialize()  # type: ignore[union-attr]
                await acted(environment, "hang")
        assert all_gone(tmp_path)
        with pytest.raises(EnvDiedError, match="exit code 3"):
            async with source.lease(spec, "dies") as environment:
                await acted(environment, "die")
        async with source.lease(spec, "fails") as environment:
            with pytest.raises(TimeoutError, match="the shop is closed") as caught:
                await acted(environment, "late")
            assert type(caught.value) is TimeoutError
            with pytest.raises(EnvError, match="takes no|unexpected keyword"):
                await environment._call("ainitialize", {"wrong": 1})  # type: ignore[union-attr]
            assert (await acted(environment, "on")).startswith("on 2 in "), "it lives"
            with pytest.raises(EnvError, match="has no get_state"):
                await source.pool(spec).get_state()
        with pytest.raises(LoadError, match="it is broken"):
            async with source.lease(replace(spec, settings={"folder": "", "broken": True}), "broken"):
                pass

    own(play)


def test_what_runs_beside_the_calls_goes_on_between_them(spec: EnvironmentSpec, tmp_path: Path) -> None:
    async def play(source: LocalEnvironmentSource) -> None:
        async with source.lease(spec, "first") as environment:
            await environment.ainitialize()  # type: ignore[union-attr]
            await until(lambda: noted(tmp_path, "beside"))

    own(play)


def call(how: str) -> str:
    return f'<tool_call>{{"name": "act", "arguments": {{"how": "{how}"}}}}</tool_call>'


def buying(count: int) -> str:
    return f'<tool_call>{{"name": "buy", "arguments": {{"item": "tea", "count": {count}}}}}</tool_call>'


def episode_of(replies: list[str], **settings: Any) -> Trajectory:
    async def main() -> Any:
        workflow = build_workflow("environment", parts(**settings))
        try:
            return await workflow.arun_episode(ScriptedEngine(replies=replies), episode())
        finally:
            await workflow.aclose()

    found: Trajectory = asyncio.run(asyncio.wait_for(main(), WAIT_S))
    found.metrics.pop("tool_seconds")
    return found


def test_an_episode_is_the_same_in_a_process() -> None:
    """Results, errors of both kinds, rewards and the end."""
    settings = {"environment": f"{HERE}Shop", "environment_kwargs": {"stock": 4}}
    replies = [buying(9), buying(-1), '<tool_call>{"name": "sell"}</tool_call>', buying(1), buying(3), "never asked"]
    here = episode_of(replies, **settings)
    assert episode_of(replies, num_env_workers=1, **settings) == here
    assert here.rewards is not None and sum(here.rewards) == 4.0 and here.metrics["num_turns"] == 5


def test_the_policy_reads_that_its_call_was_not_done_and_cannot_go_on_with_the_state_lost(
    spec: EnvironmentSpec, tmp_path: Path
) -> None:
    settings = {"environment": spec.name, "environment_kwargs": dict(spec.settings), "num_env_workers": 1, "tool_timeout_s": 0.05}
    found = episode_of([call("hang"), "Then not."], **settings)
    assert "Error: act was not done after 0.05 s" in tokenizer().decode(found.response_ids)
    with pytest.raises(EnvDiedError):
        episode_of([call("hang"), call("go")], **settings)
    assert len(noted(tmp_path, "begun")) == 2 and all_gone(tmp_path)


STEPS = """
import asyncio

from rlhub.envs.base import StepEnvironment


class Counting(StepEnvironment):
    def __init__(self):
        self.loop, self.count = asyncio.get_running_loop(), 0

    async def reset(self, *, seed=None, options=None):
        self.count = seed
        return "go", {}

    async def step(self, action):
        assert asyncio.get_running_loop() is self.loop
        self.count += 1
        return f"{action} {self.count}", 1.0, False, False, {}

    async def get_state(self):
        return self.count

    async def close(self):
        pass
"""


def test_an_asynchronous_step_environment_runs_in_a_process_too(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(STEPS)
    spec = EnvironmentSpec(name=f"{tmp_path / 'counting.py'}:Counting")

    async def seen(source: LocalEnvironmentSource, num_workers: int) -> list[Any]:
        async with source.lease(replace(spec, num_workers=num_workers), "") as environment:
            assert isinstance(environment, StepEnvironment)
            found = [await environment.reset(seed=3), await environment.step("up"), await environment.get_state()]
            with pytest.raises(EnvError, match="cannot load a state"):
                await environment.load_state(3)
            return found

    async def play(source: LocalEnvironmentSource) -> None:
        here, there = await seen(source, 0), await seen(source, 1)
        assert there == here == [("go", {}), ("up 4", 1.0, False, False, {}), 4]
        assert source.pool(replace(spec, num_workers=1)).num_alive == 1

    own(play)
