"""Requests that are followed through the service: what is told comes early, in order, and stays true."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhub.agents.remote.streaming import TokenStreams
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, RolloutSetup
from rlhub.errors import WorkflowError
from rlhub.rollout_service.router import Router
from rlhub.rollout_service.server import RolloutServer
from tests.support.rollout_service import PACE, LimitedFake, Replicas, Weights, request, sampling
from tests.unit.agents.remote.test_episode_actor import DATA, remotely, whole
from tests.unit.rollout_service.test_router import holding, play, until

WILFUL = "wilful_fake"
built = itertools.count()


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path)


def own_tokens(number: int, request: GenerationRequest, params: SamplingParams) -> list[int]:
    """Engine number `number` writes 100 * number, 100 * number + 1 and so on."""
    return [100 * number + place for place in range(params.max_new_tokens)]


def wilful_fake(setup: RolloutSetup) -> FakeEngine:
    """No two write the same."""
    return LimitedFake(setup, script=partial(own_tokens, next(built)))


class Wilful(RolloutServer):
    def __init__(self, config: Any, runtime: Any) -> None:
        if WILFUL not in ROLLOUT_ENGINES:
            ROLLOUT_ENGINES.register(WILFUL)(wilful_fake)
        config.rollout.name = WILFUL
        super().__init__(config, runtime)


class Follower:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.calls = 0

    def __call__(self, progress: Progress) -> None:
        self.calls += 1
        self.tokens += progress.token_ids
        assert len(progress.token_ids) == len(progress.log_probs) == len(progress.versions) > 0


async def hear(follower: Follower, *counts: int) -> None:
    """Let it hear so many tokens, one count after the other; then nothing holds anything up."""
    for count in counts:
        PACE.set(count)
        await until(lambda: len(follower.tokens) == count)  # noqa: B023  it is called at once
    PACE.set(None)


def test_tokens_are_told_before_the_completion_is_there(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        follower = Follower()
        PACE.set(None)
        alone = await router.agenerate(request(), sampling(20))
        PACE.set(0)
        task = asyncio.create_task(router.agenerate(request(), sampling(20), follower))
        await hear(follower, 3, 11)
        completion = await task
        assert completion == alone
        assert completion.token_ids[: len(follower.tokens)] == follower.tokens and follower.calls >= 2

    play(scenario, weights, held=0)


def test_what_was_told_stays_true_when_the_replica_dies(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        follower = Follower()
        task = asyncio.create_task(router.agenerate(request(), sampling(40), follower))
        await until(lambda: len(follower.tokens) == 5)
        first, victim = list(follower.tokens), holding(router)
        victim.actor.kill()
        PACE.set(None)
        completion = await task
        assert completion.token_ids[: len(first)] == first
        assert completion.token_ids[: len(follower.tokens)] == follower.tokens
        assert len(completion.token_ids) == len(completion.log_probs) == len(completion.versions) == 40
        authors = {token // 100 for token in completion.token_ids}
        assert len(authors) == 2, "the second replica went on"
        assert [token % 100 for token in completion.token_ids] == list(range(40))
        assert router.metrics()["rollout/lost_tokens"] == 0

    play(scenario, weights, server=Wilful, held=5)


class Mute(Wilful):
    """It tells the tokens and never answers, if there are 13 of them."""

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: str = "") -> Completion:
        if params.max_new_tokens == 13:
            with self._streams.of(follow) as stream:
                await self.engine.agenerate(request, params, stream.follow)
                await asyncio.sleep(60)
        return await super().agenerate(request, params, follow)


def test_a_completion_of_which_only_the_answer_was_lost_is_complete(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        follower = Follower()
        task = asyncio.create_task(router.agenerate(request(), sampling(13), follower))
        await until(lambda: len(follower.tokens) == 13)
        await asyncio.sleep(0.02)
        assert not task.done()
        holding(router).actor.kill()
        completion = await asyncio.wait_for(task, 60)
        assert completion.token_ids == follower.tokens and completion.finish_reason == "length"

    play(scenario, weights, server=Mute)


def test_a_follower_that_fails_ends_its_request(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        def follow(progress: Progress) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await router.agenerate(request(), sampling(60), follow)
        for replica in router.fleet.replicas.values():
            status = await replica.actor.call("status")
            assert status.num_tokens == 0 and replica.requests == 0
        PACE.set(None)
        await router.agenerate(request(), sampling())

    play(scenario, weights, held=3)


def test_a_cancelled_request_is_told_of_no_more(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        follower = Follower()
        task = asyncio.create_task(router.agenerate(request(), sampling(60), follower))
        await until(lambda: len(follower.tokens) == 5)
        replica = holding(router)
        task.cancel()
        await asyncio.wait([task])
        PACE.set(None)
        while (await replica.actor.call("status")).load:  # until the limit of the whole scenario
            await asyncio.sleep(0.001)
        assert len(follower.tokens) == 5 and (await replica.actor.call("status")).num_tokens == 0

    play(scenario, weights, held=5)


def test_a_pin_tells_too(weights: Weights) -> None:
    async def scenario(router: Router, weights: Weights, replicas: Replicas) -> None:
        follower = Follower()
        async with await router.pin(0) as pin:
            task = asyncio.create_task(pin.agenerate(request(), sampling(20), follower))
            await hear(follower, 3, 11)
            completion = await task
        assert follower.calls >= 2 and completion.token_ids[: len(follower.tokens)] == follower.tokens

    play(scenario, weights, held=0)


def one(token: int, reason: Any = None) -> Progress:
    return Progress(token_ids=[token], log_probs=[-1.0], versions=[3], finish_reason=reason)


def test_token_streams_wait_for_requests_that_were_overtaken_and_forget_those_that_ended() -> None:
    async def scenario() -> None:
        streams = TokenStreams()
        early = asyncio.create_task(streams.after("a", 0))
        await asyncio.sleep(0)
        with streams.of("a") as stream:
            stream.follow(one(8))
            stream.follow(one(9, "stop"))
            found = await early
            assert found is not None and (found.token_ids, found.finish_reason) == ([8, 9], "stop")
            found = await streams.after("a", 1)
            assert found is not None and (found.token_ids, found.log_probs, found.versions) == ([9], [-1.0], [3])
            late = asyncio.create_task(streams.after("a", 2))
            await asyncio.sleep(0)
            assert not late.done()
        assert await late is None
        assert await streams.after("a", 2) is None
        vain = asyncio.create_task(streams.after("a", 0))
        await asyncio.sleep(0)
        vain.cancel()
        await asyncio.wait([vain])
        assert not streams._begun and not streams._awaited

    asyncio.run(asyncio.wait_for(scenario(), 60))


heard: list[int] = []


class Listens(RolloutWorkflow):
    """Notes what it is told."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        follow = (lambda progress: heard.extend(progress.token_ids)) if data.row["listens"] else fails
        completion = await engine.agenerate(self.request(data), self.parts.sampling, follow)
        assert completion.token_ids[: len(heard)] == heard
        return whole(completion, data.prompt_ids)


def fails(progress: Progress) -> None:
    raise WorkflowError("I will not listen")


class Waits:
    """Writes no further than it is heard."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        assert follow is not None
        told = [one(token) for token in (5, 6, 7, 8)]
        try:
            for place, progress in enumerate(told):
                while len(heard) < place:
                    await asyncio.sleep(0.001)
                follow(progress)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Completion(token_ids=[5, 6, 7, 8], log_probs=[-1.0] * 4, finish_reason="stop", versions=[3] * 4)


def test_an_episode_in_a_host_hears_of_its_tokens_as_they_come() -> None:
    heard.clear()
    found = remotely(f"{__name__}:Listens", Waits(), replace(DATA, row={"listens": True}))
    assert found.response_ids == [5, 6, 7, 8] and heard[:3] == [5, 6, 7]


def test_what_a_follower_in_a_host_raises_ends_its_generation() -> None:
    heard.clear()
    engine = Waits()
    with pytest.raises(WorkflowError, match="I will not listen"):
        remotely(f"{__name__}:Listens", engine, replace(DATA, row={"listens": False}))
    assert engine.cancelled == 1
