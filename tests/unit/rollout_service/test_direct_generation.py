"""Episodes in actors that generate at the replicas themselves: the router chooses, repeats and counts, and gets no tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rlhub.agents.partials import TrackedEngine
from rlhub.agents.remote.episode_actor import EpisodeActor, EpisodeActorSettings, WorkflowKey
from rlhub.agents.remote.episode_messages import Reports
from rlhub.agents.remote.workflow import EpisodeActorOptions, EpisodeActors, RemoteWorkflow, episode_actor_starter
from rlhub.agents.trajectory import Sampled
from rlhub.agents.workflows.base import EpisodeData
from rlhub.errors import DeadlineError, EngineError
from rlhub.rollout_service.fleet import FleetLimits
from rlhub.rollout_service.replica import Replica
from rlhub.rollout_service.router import Router
from rlhub.single_controller.launch import LocalAsyncActor
from tests.support.episodes import parts
from tests.support.rollout_service import PACE, Replicas, Weights, fake_config, sampling

LIMIT_S, HELD = 60.0, 3
DATA = EpisodeData(prompt_ids=(5, 3, 4), ordinal=3, sample=1, seed=7, row={"ground_truth": "4"})
SETTINGS = EpisodeActorSettings(
    tokenizer=lambda: str, samplings={"training": sampling(8)}, max_prompt_length=8, max_response_length=8
)


@dataclass
class Setting:
    """A router over two replicas, and episode actors.  calls: (actor, method), by whether the driver made the call."""

    router: Router
    pool: EpisodeActors
    calls: dict[bool, list[tuple[str, str]]] = field(default_factory=lambda: {True: [], False: []})

    def run(self, data: EpisodeData = DATA, *, direct: bool = True, engine: Any = None) -> asyncio.Task[Sampled | None]:
        workflow = RemoteWorkflow(parts(), WorkflowKey("training", "single_turn"), self.pool, direct=direct)
        return asyncio.ensure_future(workflow.arun_episode(engine or self.router, data))

    def made(self, method: str, *, by_driver: bool) -> int:
        return [called for _, called in self.calls[by_driver]].count(method)

    @property
    def actor(self) -> EpisodeActor:
        """Returns the object of the first episode actor."""
        found: EpisodeActor = self.pool.members[0].actor._object._object  # type: ignore[attr-defined]
        return found

    @property
    def busy(self) -> list[Replica]:
        return [replica for replica in self.router.fleet.replicas.values() if replica.requests]


Scenario = Callable[[Setting], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """held: requests stop after HELD tokens until the scenario lets them go."""

    async def main(scenario: Scenario, *, held: bool, num_actors: int) -> None:
        router = Router(Replicas(fake_config(limited=True)), FleetLimits(restarts=2))
        pool = EpisodeActors(episode_actor_starter(SETTINGS, EpisodeActorOptions(backend="local")), num_actors)
        setting, here, call = Setting(router, pool), asyncio.get_running_loop(), LocalAsyncActor.call

        def counted(actor: LocalAsyncActor, method: str, *args: Any, **kw: Any) -> Any:
            setting.calls[asyncio.get_running_loop() is here].append((actor.name, method))
            return call(actor, method, *args, **kw)

        monkeypatch.setattr(LocalAsyncActor, "call", counted)
        weights = Weights(tmp_path)
        try:
            await asyncio.gather(*(router.add(f"rollout-{number}") for number in range(2)), pool.start())
            weights.write(0)
            await router.update(weights.folder, 0)
            PACE.set(HELD if held else None)
            await scenario(setting)
        finally:
            PACE.set(None)
            await pool.close()
            await router.close()

    def run(scenario: Scenario, *, held: bool = False, num_actors: int = 1) -> None:
        asyncio.run(asyncio.wait_for(main(scenario, held=held, num_actors=num_actors), LIMIT_S))

    return run


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def let_go(setting: Setting) -> Sampled | None:
    """Returns the trajectory of an episode that nothing happens to."""
    PACE.set(None)
    return await setting.run(direct=False)


def test_the_same_trajectories_come_and_no_completion_passes_the_driver(play: Callable[..., None]) -> None:
    """The control is the way through the driver's engine."""

    async def scenario(setting: Setting) -> None:
        samples = [replace(DATA, sample=sample, seed=sample) for sample in range(4)]
        found = await asyncio.gather(*(setting.run(data) for data in samples))
        assert (setting.made("agenerate", by_driver=True), setting.made("agenerate", by_driver=False)) == (0, 4)
        assert setting.router.counts == {"requests": 4, "completed": 4, "tokens": 32}
        await until(lambda: not setting.actor._prompts)
        assert setting.made("take_prompt", by_driver=True) == 1, "once for all samples of the prompt"
        assert setting.made("take_replica", by_driver=True) == 2
        assert await asyncio.gather(*(setting.run(data, direct=False) for data in samples)) == found
        assert setting.made("agenerate", by_driver=True) == 4
        assert len({tuple(one.response_ids) for one in found}) > 1 and setting.busy == []

    play(scenario)


def test_the_messages_of_many_episodes_travel_together(play: Callable[..., None]) -> None:
    """The control is one episode after the other."""

    async def scenario(setting: Setting) -> None:
        samples = [replace(DATA, sample=sample, seed=sample) for sample in range(16)]
        found = await asyncio.gather(*(setting.run(data) for data in samples))
        together = setting.made("deliver", by_driver=True), setting.made("reports", by_driver=True)
        assert [await setting.run(data) for data in samples] == found
        alone = setting.made("deliver", by_driver=True) - together[0], setting.made("reports", by_driver=True) - together[1]
        assert alone[0] >= 2 * 16 and alone[1] >= 2 * 16, "one starts, goes to a replica, and ends"
        assert together[0] <= 16 and together[1] <= 16 + 2, together

    play(scenario)


def test_reports_whose_answer_is_lost_come_again(play: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(setting: Setting) -> None:
        call, lost = setting.pool.members[0].actor.call, list[int]()

        async def losing(method: str, *args: Any, **kw: Any) -> Any:
            found = await call(method, *args, **kw)
            if method == "reports" and (number := Reports(*found).number) not in lost:
                lost.append(number)
                raise DeadlineError("episodes-0.reports", 60.0)
            return found

        monkeypatch.setattr(setting.pool.members[0].actor, "call", losing)
        found = await setting.run()
        assert len(lost) >= 2, "a replica was asked for, and an episode ended"
        monkeypatch.undo()
        assert found == await let_go(setting)

    play(scenario)


def test_a_request_whose_replica_dies_is_repeated_at_another(play: Callable[..., None]) -> None:
    async def scenario(setting: Setting) -> None:
        running = setting.run()
        await until(lambda: PACE.furthest == HELD)
        (replica,) = setting.busy
        replica.actor.kill()
        await until(lambda: setting.router.counts["retries"] == 1)
        PACE.set(None)
        assert await running == await let_go(setting)
        assert setting.router.fleet.counts["deaths"] == 1 and setting.busy == []
        assert setting.pool.counts == {}

    play(scenario, held=True)


def test_an_episodes_process_that_dies_costs_no_replica(play: Callable[..., None]) -> None:
    async def scenario(setting: Setting) -> None:
        running = setting.run()
        await until(lambda: PACE.furthest == HELD)
        setting.pool.members[0].actor.kill()
        await until(lambda: setting.pool.counts["episodes_again"] == 1)
        PACE.set(None)
        assert await running == await let_go(setting)
        assert setting.router.fleet.counts["deaths"] == setting.router.counts["retries"] == 0 and setting.busy == []

    play(scenario, held=True)


def test_an_episode_that_is_cancelled_ends_its_request_at_the_replica(play: Callable[..., None]) -> None:
    async def scenario(setting: Setting) -> None:
        running = setting.run()
        await until(lambda: PACE.furthest == HELD)
        (replica,) = setting.busy
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert setting.busy == []
        while (await replica.actor.call("status")).load:
            await asyncio.sleep(0.002)
        PACE.set(None)
        assert await setting.run() is not None

    play(scenario, held=True)


def test_a_checkpoint_has_the_tokens_and_generation_goes_on_after_them(play: Callable[..., None]) -> None:
    async def scenario(setting: Setting) -> None:
        engine = TrackedEngine(setting.router, DATA)
        running = setting.run(engine=engine)
        await until(lambda: PACE.furthest == HELD)
        await setting.router.abort(engine.request_ids())
        await engine.settled()
        written = engine.written
        assert written is not None and len(written.token_ids) == HELD and written.finish_reason == "abort"
        PACE.set(None)
        whole, expected = await running, await let_go(setting)
        assert whole == expected and whole.response_ids[:HELD] == written.token_ids  # type: ignore[union-attr]
        resumed = replace(DATA, partial=written)
        again = TrackedEngine(setting.router, resumed)
        assert await setting.run(resumed, engine=again) == expected
        assert setting.made("agenerate", by_driver=True) == 1  # the control's

    play(scenario, held=True)


def test_an_abort_that_nobody_here_wanted_rejects_the_sample(play: Callable[..., None]) -> None:
    async def scenario(setting: Setting) -> None:
        engine = TrackedEngine(setting.router, DATA)
        running = setting.run(engine=engine)
        await until(lambda: PACE.furthest == HELD)
        await setting.router.abort([DATA.session])
        with pytest.raises(Exception, match="aborted"):
            await running

    play(scenario, held=True)


def test_an_error_of_the_engine_reaches_the_episode(play: Callable[..., None]) -> None:
    async def scenario(setting: Setting) -> None:
        with pytest.raises(EngineError, match="prompt"):
            await setting.run(replace(DATA, prompt_ids=()))
        assert await setting.run() is not None
        assert setting.router.fleet.counts["deaths"] == 0

    play(scenario)
