"""What a checkpoint keeps of running generations: their tokens, from which the next life goes on."""

import asyncio
import json
from collections.abc import Callable

import pytest

from rlhub.agents import partials
from rlhub.agents.partials import TrackedEngine
from rlhub.agents.workflows.base import EpisodeData
from rlhub.agents.workflows.turns import SingleTurn
from rlhub.engines.rollout.base import Completion, FinishReason, Follow, GenerationRequest, Progress, SamplingParams
from rlhub.rollout_service.executor.staleness import StalenessManager
from tests.support.episodes import PROMPT, executing, parts, prompts

LENGTH = 8


class Typist:
    """An engine that writes tokens 100, 101, ... one at a time, LENGTH in all, and can be told to abort."""

    def __init__(self, start_version: int = 0, stop_after: int | None = None) -> None:
        self.version, self.stop_after = start_version, stop_after
        self.requests: list[GenerationRequest] = []
        self.aborted: dict[str, asyncio.Event] = {}
        self.waiting = 0

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        self.requests.append(request)
        abort = self.aborted[request.request_id] = asyncio.Event()
        tokens: list[int] = []
        for position in range(request.start, LENGTH):
            if self.stop_after is not None and position >= self.stop_after:
                self.waiting += 1
                await abort.wait()
                self.waiting -= 1
            if abort.is_set():
                return self.completion(tokens, "abort")
            tokens.append(100 + position)
        return self.completion(tokens, "stop")

    def completion(self, tokens: list[int], reason: str) -> Completion:
        count = len(tokens)
        return Completion(token_ids=tokens, log_probs=[-0.5] * count, finish_reason=reason, versions=[self.version] * count)

    async def interrupt(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.aborted[request_id].set()


def wait_until(executor, condition: Callable[[], bool]) -> None:
    """It is looked at on the executor's loop, where nothing changes meanwhile."""

    async def holds() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    asyncio.run_coroutine_threadsafe(holds(), executor.runner.loop).result(60)


def wait_until_typed(executor, engine: Typist, count: int) -> None:
    wait_until(executor, lambda: engine.waiting >= count)


def test_a_resumed_run_goes_on_with_the_tokens_it_had() -> None:
    engine = Typist(stop_after=3)
    with executing(
        SingleTurn(parts()), staleness=StalenessManager(2, 0), engine=engine, group_size=2, interrupt=engine.interrupt
    ) as executor:
        executor.start(prompts())
        wait_until_typed(executor, engine, 4)
        state = json.loads(json.dumps(executor.state()))
        wait_until_typed(executor, engine, 4)  # generation went on, from where it was
        assert all(request.start == 3 and len(request.prompt_ids) == 5 for request in engine.requests[4:])
    assert [work["ordinal"] for work in state["begun"]] == [0, 1]
    engine = Typist(start_version=0)
    with executing(SingleTurn(parts()), staleness=StalenessManager(2, 0), engine=engine, group_size=2) as executor:
        executor.load_state(state)
        assert executor.staleness.running == 2 and executor.staleness.capacity == 0
        executor.start(prompts())
        groups = executor.next_groups(2, 60)
    assert all(request.start == 3 for request in engine.requests)
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.prompt_ids == list(PROMPT)
            assert trajectory.response_ids == [100 + index for index in range(LENGTH)]
            assert len(trajectory.rollout_log_probs) == len(trajectory.versions) == LENGTH


def test_an_interrupted_generation_ends_as_if_nothing_had_been() -> None:
    engine = Typist(stop_after=5)
    with executing(SingleTurn(parts()), staleness=StalenessManager(1, 0), engine=engine, interrupt=engine.interrupt) as executor:
        executor.start(prompts())
        for version in (1, 2):
            wait_until_typed(executor, engine, 1)
            executor.state()
            engine.version = version
        wait_until_typed(executor, engine, 1)
        engine.stop_after = None
        executor.state()
        trajectory = executor.next_groups(1, 60)[0].trajectories[0]
    assert trajectory.response_ids == [100 + index for index in range(LENGTH)]
    assert [request.start for request in engine.requests[:4]] == [0, 5, 5, 5]


def test_an_abort_that_nobody_here_wanted_rejects_the_sample() -> None:
    class Aborting(Typist):
        async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
            if request.session == "0-0":
                return self.completion([100], "abort")
            return await super().agenerate(request, params)

    with executing(SingleTurn(parts()), staleness=StalenessManager(1, 0), engine=Aborting()) as executor:
        executor.start(prompts())
        assert executor.next_groups(1, 60)[0].ordinal == 1


def test_samples_of_a_group_that_are_finished_are_not_made_again() -> None:
    class OneSlow(SingleTurn):
        async def arun_episode(self, engine, data):
            if data.sample == 1:
                await asyncio.sleep(60)
            return await super().arun_episode(engine, data)

    engine = Typist()
    with executing(OneSlow(parts()), staleness=StalenessManager(1, 0), engine=engine, group_size=2) as executor:
        executor.start(prompts())
        wait_until(executor, lambda: any(work.trajectories[0] for work in executor._work.values()))
        state = executor.state()
    assert state["begun"][0]["samples"][0]["trajectory"]["response_ids"][0] == 100
    engine = Typist()
    with executing(SingleTurn(parts()), staleness=StalenessManager(1, 0), engine=engine, group_size=2) as executor:
        executor.load_state(state)
        executor.start(prompts())
        assert len(executor.next_groups(1, 60)[0].trajectories) == 2
        assert [request.session for request in engine.requests] == ["0-1"]


def test_a_service_that_does_not_answer_holds_up_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(request_ids: list[str]) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(partials, "COLLECT_S", 0.05)
    engine = Typist(stop_after=3)
    with executing(SingleTurn(parts()), staleness=StalenessManager(1, 0), engine=engine, interrupt=never) as executor:
        executor.start(prompts())
        wait_until_typed(executor, engine, 1)
        state = executor.state()
    assert state["begun"] == [] and state["ledger"]["open"] == [[0, "running"]]


def test_a_first_turn_that_was_complete_is_kept_while_the_second_is_written() -> None:
    done = Completion(token_ids=[7, 8], log_probs=[-0.1, -0.2], finish_reason="stop", versions=[3, 3])
    data = EpisodeData(prompt_ids=tuple(PROMPT), ordinal=0, sample=0, seed=1, partial=done)
    engine = TrackedEngine(Typist(), data)
    asyncio.run(engine.agenerate(GenerationRequest(prompt_ids=[*PROMPT, 7, 8, 9], seed=2), SamplingParams()))
    assert engine.written == done


def test_who_follows_hears_each_token_once_over_an_interruption() -> None:
    class Interrupted:
        """Tells three of the first four tokens, and is interrupted."""

        def __init__(self) -> None:
            self.go_on = asyncio.Event()

        async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
            assert follow is not None
            first = request.start == 0
            tokens = [10, 11, 12, 13] if first else [14, 15]
            for token in tokens[:3] if first else tokens:
                follow(Progress(token_ids=[token], log_probs=[-0.5], versions=[1]))
            if first:
                await self.go_on.wait()
            reason: FinishReason = "abort" if first else "stop"
            return Completion(token_ids=tokens, log_probs=[-0.5] * len(tokens), finish_reason=reason, versions=[1] * len(tokens))

    async def scenario() -> None:
        inner, told = Interrupted(), list[int]()
        engine = TrackedEngine(inner, EpisodeData(prompt_ids=(3, 4), ordinal=0, sample=0, seed=1))
        request = GenerationRequest(prompt_ids=[3, 4], seed=1)
        task = asyncio.create_task(engine.agenerate(request, SamplingParams(), lambda progress: told.extend(progress.token_ids)))
        await asyncio.sleep(0)
        assert told == [10, 11, 12] and engine.request_ids()
        inner.go_on.set()
        assert (await task).token_ids == [10, 11, 12, 13, 14, 15] == told

    asyncio.run(scenario())
