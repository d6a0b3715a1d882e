"""Episodes in actors of the local backend: what they leave, and how they end, is as it is on the driver's own loop."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rlhub.agents.remote.episode_actor import EpisodeActor, EpisodeActorSettings, WorkflowKey
from rlhub.agents.remote.episode_messages import pack_ref, unpack_ref
from rlhub.agents.remote.workflow import EpisodeActorOptions, EpisodeActors, RemoteWorkflow, episode_actor_starter
from rlhub.agents.trajectory import Trajectory, TrajectoryRef
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts, build_workflow
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import DataError, EngineError, WorkerDiedError, WorkerError, WorkflowError
from rlhub.rewards.pool import RewardFunction
from rlhub.single_controller.async_actor import AsyncActor
from rlhub.utils.aio.results import Reject

SAMPLING = SamplingParams(max_new_tokens=4)
DATA = EpisodeData(
    prompt_ids=(5, 6), ordinal=3, sample=1, seed=7, row={"data_source": "", "ground_truth": "4", "extra_info": None}
)
HERE = f"{__name__}:"


class Policy:
    """An engine whose tokens follow from prompt and seed.  hold: requests with these seeds wait; all wait until there have been
    so many `together`."""

    def __init__(self, *hold: int, error: Exception | None = None, together: int = 1) -> None:
        self.hold, self.error, self.together = hold, error, together
        self.sessions: list[str] = []
        self.running = self.most = self.cancelled = 0

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        self.sessions.append(request.session)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            while self.most < self.together:
                await asyncio.sleep(0.001)
            await asyncio.sleep(600.0 if request.seed in self.hold else 0.002)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        tokens = [sum(request.prompt_ids) + request.seed + index for index in range(params.max_new_tokens)]
        return Completion(token_ids=tokens, log_probs=[-0.5] * len(tokens), finish_reason="stop", versions=[2] * len(tokens))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, float]:
    return {"score": float(ground_truth) + len(solution_str), "length": float(len(solution_str))}


async def score(row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
    return float(row["ground_truth"]) + len(text), {"length": float(len(text))}


def whole(completion: Completion, prompt: tuple[int, ...]) -> Trajectory:
    length = len(completion.token_ids)
    return Trajectory(
        prompt_ids=list(prompt),
        response_ids=completion.token_ids,
        response_mask=[1] * length,
        rollout_log_probs=completion.log_probs,
        versions=completion.versions,
    )


class BestOfTwo(RolloutWorkflow):
    """Two generations at the same time, and a score."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        first = self.request(data)
        found = await asyncio.gather(
            *(engine.agenerate(one, self.parts.sampling) for one in (first, replace(first, seed=first.seed + 1)))
        )
        made = whole(found[1], data.prompt_ids)
        reward, details = await self.parts.score(data.row, self.parts.tokenizer(found[0].token_ids))
        made.set_reward(reward)
        made.metrics = details
        return made


class Impatient(RolloutWorkflow):
    """Withdraws a question when it is being answered, and asks another."""

    asked = threading.Event()

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        first = self.request(data)
        asking = asyncio.create_task(engine.agenerate(first, self.parts.sampling))  # type: ignore[arg-type]
        while not Impatient.asked.is_set():
            await asyncio.sleep(0.001)
        asking.cancel()
        return whole(await engine.agenerate(replace(first, seed=0), self.parts.sampling), data.prompt_ids)


class Ends(RolloutWorkflow):
    """As the row says."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        match data.row["end"]:
            case "none":
                return None
            case "reject":
                raise Reject("too easy")
            case "cancelled":
                raise asyncio.CancelledError
            case "generation":
                await engine.agenerate(self.request(data), self.parts.sampling)
            case error:
                raise error
        raise AssertionError("not reached")


cleaned: list[str] = []


class Patient(RolloutWorkflow):
    """Notes that it could clean up."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        try:
            return whole(await engine.agenerate(self.request(data), self.parts.sampling), data.prompt_ids)
        except asyncio.CancelledError:
            cleaned.append(data.session)
            raise

    async def aclose(self) -> None:
        cleaned.append("closed")


def make_tokenizer() -> Callable[[list[int]], str]:
    return str


SETTINGS = EpisodeActorSettings(
    tokenizer=make_tokenizer,
    samplings={"training": SAMPLING},
    max_prompt_length=8,
    max_response_length=4,
    kwargs={},
    reward=RewardFunction(target=f"{__name__}:compute_score", num_workers=1),
)
PARTS = WorkflowParts(tokenizer=str, sampling=SAMPLING, max_prompt_length=8, max_response_length=4, score=score)


def within(
    play: Callable[[EpisodeActors], Awaitable[Any]],
    *,
    num_actors: int = 1,
    restarts: int = 1,
    settings: EpisodeActorSettings = SETTINGS,
) -> Any:
    async def main() -> Any:
        pool = EpisodeActors(episode_actor_starter(settings, EpisodeActorOptions(backend="local")), num_actors, restarts=restarts)
        await pool.start()
        try:
            return await play(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def remotely(name: str, engine: EpisodeEngine, data: EpisodeData = DATA, settings: EpisodeActorSettings = SETTINGS) -> Any:
    async def play(pool: EpisodeActors) -> Any:
        return await remote(name, pool).arun_episode(engine, data)

    return within(play, settings=settings)


def remote(name: str, pool: EpisodeActors) -> RemoteWorkflow:
    return RemoteWorkflow(PARTS, WorkflowKey("training", name), pool)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("name", "at_once"), [("single_turn", 1), (f"{HERE}BestOfTwo", 2)])
def test_a_trajectory_is_that_of_an_episode_on_the_driver(name: str, at_once: int) -> None:
    there, here = Policy(together=at_once), Policy(together=at_once)
    found = remotely(name, there)
    assert found == asyncio.run(build_workflow(name, PARTS).arun_episode(here, DATA))
    assert there.sessions == here.sessions and there.most == here.most == at_once
    other = remotely(name, Policy(), settings=replace(SETTINGS, samplings={"training": SamplingParams(max_new_tokens=3)}))
    assert other != found  # the actor's own sampling counts


def test_an_error_keeps_its_type_and_says_where_it_was_raised() -> None:
    with pytest.raises(DataError, match="row 3") as caught:
        remotely(f"{HERE}Ends", Policy(), replace(DATA, row={"end": DataError("row 3 has no prompt")}))
    assert isinstance(caught.value.__cause__, WorkerError) and "arun_episode" in caught.value.__cause__.remote_traceback
    with pytest.raises(WorkerError, match="ValueError: no tool") as foreign:
        remotely(f"{HERE}Ends", Policy(), replace(DATA, row={"end": ValueError("no tool")}))
    assert foreign.value.remote_type == "ValueError" and "arun_episode" in foreign.value.remote_traceback
    with pytest.raises(TimeoutError):
        remotely(f"{HERE}Ends", Policy(), replace(DATA, row={"end": TimeoutError("the tool")}))
    with pytest.raises(WorkflowError, match="cancelled by its own code"):
        remotely(f"{HERE}Ends", Policy(), replace(DATA, row={"end": "cancelled"}))
    with pytest.raises(WorkerDiedError):  # of something else, while its actor lives
        died = WorkerDiedError("a tool's process", role="tool", rank=0)
        remotely(f"{HERE}Ends", Policy(), replace(DATA, row={"end": died}))


def test_reject_and_none_travel_as_they_are() -> None:
    assert remotely(f"{HERE}Ends", Policy(), replace(DATA, row={"end": "none"})) is None
    with pytest.raises(Reject, match="too easy"):
        remotely(f"{HERE}Ends", Policy(), replace(DATA, row={"end": "reject"}))


@pytest.mark.parametrize(
    "error", [EngineError("out of memory"), ValueError("out of memory"), WorkerDiedError("out of memory", role="rollout", rank=0)]
)
def test_a_generation_that_fails_fails_in_the_episode(error: Exception) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        remotely(f"{HERE}Ends", Policy(error=error), replace(DATA, row={"end": "generation"}))


def test_cancelling_ends_the_episode_there_and_what_it_asked_for() -> None:
    cleaned.clear()
    engine = Policy(7)

    async def play(pool: EpisodeActors) -> None:
        workflow = remote(f"{HERE}Patient", pool)
        waiting = asyncio.create_task(workflow.arun_episode(engine, DATA))
        await until(lambda: engine.running == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: cleaned == [DATA.session])
        assert (engine.running, engine.cancelled, pool.members[0].episodes) == (0, 1, 0)
        assert await workflow.arun_episode(engine, replace(DATA, seed=8)) is not None  # the actor goes on

    within(play)
    assert cleaned == [DATA.session, "closed"]


def test_a_withdrawn_question_is_not_answered() -> None:
    class InTurns(Policy):
        """Answers the second question when it is rid of the first."""

        async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
            if request.seed in self.hold:
                Impatient.asked.set()
            else:
                await until(lambda: self.cancelled == 1)
            return await super().agenerate(request, params)

    assert remotely(f"{HERE}Impatient", InTurns(DATA.seed)).response_ids[0] == sum(DATA.prompt_ids)


@pytest.mark.parametrize(
    "ref",
    [
        TrajectoryRef(home="h", key="7", prompt_length=3, response_length=9, runs=[(2, 4), (3, 1)]),
        TrajectoryRef(home="h", key="8", prompt_length=3, response_length=9, runs=[], finish_reason="length", metrics={"n": 2.0}),
        TrajectoryRef(home="h", key="9", prompt_length=3, response_length=9, runs=[(0, 9)], rewards=[0.0]),
        TrajectoryRef(home="h", key="9", prompt_length=3, response_length=9, runs=[(0, 9)], added_rewards=[0.5]),
    ],
)
def test_the_numbers_of_an_episode_arrive_as_they_are(ref: TrajectoryRef) -> None:
    packed = pack_ref(int(ref.key), ref)
    assert unpack_ref(pickle.loads(pickle.dumps(packed)), "h") == ref
    assert len(pickle.dumps([packed] * 2)) < len(pickle.dumps([ref])), "smaller than the object"


def test_the_host_with_the_fewest_episodes_gets_the_next() -> None:
    engine = Policy(7)

    async def play(pool: EpisodeActors) -> None:
        workflow = remote("single_turn", pool)
        tasks = []
        for _ in range(6):
            tasks.append(asyncio.create_task(workflow.arun_episode(engine, DATA)))
            await asyncio.sleep(0)
        assert [member.episodes for member in pool.members] == [3, 3]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    within(play, num_actors=2)


def test_an_episode_begins_anew_when_its_host_dies_as_often_as_is_allowed() -> None:
    engine = Policy(7)

    async def play(pool: EpisodeActors) -> None:
        workflow = remote("single_turn", pool)
        waiting = asyncio.create_task(workflow.arun_episode(engine, DATA))
        await until(lambda: engine.running == 1)
        engine.hold = ()
        pool.members[0].actor.kill()
        trajectory = await waiting
        assert trajectory == await build_workflow("single_turn", PARTS).arun_episode(Policy(), DATA)
        assert pool.counts == {"deaths": 1, "restarts": 1, "episodes_again": 1}
        await until(lambda: engine.cancelled == 1)  # what the first attempt had asked for
        pool.members[0].actor.kill()
        with pytest.raises(WorkflowError, match="replica_restarts=1"):
            await workflow.arun_episode(engine, DATA)

    within(play)


def test_a_host_that_starts_while_all_are_ended_is_ended_too() -> None:
    started: list[AsyncActor] = []

    async def slowly(name: str) -> AsyncActor:
        if started:
            await go_on.wait()
        started.append(await episode_actor_starter(SETTINGS, EpisodeActorOptions(backend="local"))(name))
        return started[-1]

    go_on = asyncio.Event()

    async def play() -> None:
        pool = EpisodeActors(slowly, 1)
        await pool.start()
        started[0].kill()
        await until(lambda: pool.counts["restarts"] == 1)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.01)
        assert len(started) == 1 and not closing.done()
        go_on.set()
        await closing
        assert [actor.ended for actor in started] == [True, True]

    asyncio.run(play())


def test_one_that_cannot_start_ends_the_others() -> None:
    started: list[AsyncActor] = []

    async def once(name: str) -> AsyncActor:
        if name == "episodes-0":
            raise WorkerError("no module", role=name, rank=0)
        started.append(await episode_actor_starter(SETTINGS, EpisodeActorOptions(backend="local"))(name))
        return started[-1]

    with pytest.raises(WorkerError, match="no module"):
        asyncio.run(EpisodeActors(once, 2).start())
    assert [actor.ended for actor in started] == [True]


def test_a_run_has_one_episode() -> None:
    async def play() -> None:
        actor = EpisodeActor(SETTINGS)
        await actor.take_prompt(0, ("training", "single_turn"), 3, DATA.prompt_ids, DATA.row, False, False)
        await actor.deliver(([(1, 0, 1, 7)], [], []))
        with pytest.raises(WorkflowError, match="run 1 "):
            await actor.deliver(([(2, 0, 1, 7), (1, 0, 1, 7)], [], []))
        with pytest.raises(WorkflowError, match="no run 2 "):
            await actor.next_message(2)
        await actor.respond(9, 0, None)
        await actor.cancel(9)
        with pytest.raises(WorkflowError, match="no run 9 "):
            await actor.next_message(9)
        await actor.close()

    asyncio.run(play())
