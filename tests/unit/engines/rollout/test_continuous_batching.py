"""The engine loop: callers on several event loops, failures, and who may have the engine when."""

import asyncio
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.continuous_batching import EngineLoop, TokenEvent
from rlhub.errors import EngineError, RequestError

PARAMS = SamplingParams(max_new_tokens=50)


class Counter:
    """Gives every request the number of the step, `length` times; fails at a step it is told."""

    def __init__(self, fails_at: int | None = None, length: int = 50) -> None:
        self.fails_at = fails_at
        self.length = length
        self.steps = 0
        self.recomputed: list[int] = []  # the steps before which it was told
        self.given: dict[int, int] = {}
        self.threads: set[int] = set()

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self.given[key] = 0

    def step(self) -> Sequence[TokenEvent]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.steps == self.fails_at:
            raise ZeroDivisionError("the device is gone")
        events = []
        for key in list(self.given):
            self.given[key] += 1
            finished = self.given[key] == self.length
            events.append(TokenEvent(key, self.steps, 0.0, "length" if finished else None))
            if finished:
                del self.given[key]
        return events

    def remove(self, keys: Collection[int]) -> None:
        for key in keys:
            self.given.pop(key, None)

    def recompute(self) -> None:
        self.recomputed.append(self.steps)


def request(name: str = "") -> GenerationRequest:
    return GenerationRequest(prompt_ids=[1], seed=0, request_id=name)


def loop_over(stepper: Counter) -> EngineLoop:
    return EngineLoop(lambda: stepper, lambda: 4)


def test_callers_on_several_event_loops_share_the_steps_of_one_thread() -> None:
    stepper = Counter()
    loop = loop_over(stepper)
    loop.pause()
    answers: list[Completion] = []

    async def many() -> None:
        answers.extend(await asyncio.gather(*(loop.generate(request(), PARAMS) for _ in range(20))))

    callers = [threading.Thread(target=asyncio.run, args=(many(),)) for _ in range(3)]
    for caller in callers:
        caller.start()
    while loop.load < 60:
        time.sleep(0.001)
    loop.resume()
    for caller in callers:
        caller.join(60)
    assert len(answers) == 60
    assert all(answer.token_ids == list(range(1, 51)) and answer.versions == [4] * 50 for answer in answers)
    assert stepper.steps == 50
    assert len(stepper.threads) == 1 and threading.get_ident() not in stepper.threads
    loop.close()
    assert all(thread.ident not in stepper.threads for thread in threading.enumerate())


class Stepped(Counter):
    """A step waits until it is allowed."""

    def __init__(self, length: int) -> None:
        super().__init__(length=length)
        self.allowed = threading.Semaphore(0)

    def step(self) -> Sequence[TokenEvent]:
        assert self.allowed.acquire(timeout=60)
        return super().step()


def test_tokens_are_told_as_they_come_on_the_loop_that_asked() -> None:
    stepper = Stepped(length=3)
    loop = loop_over(stepper)

    async def scenario() -> None:
        told: asyncio.Queue[tuple[Progress, int]] = asyncio.Queue()
        loop.pause()  # until both are there
        silent = asyncio.create_task(loop.generate(request(), PARAMS))
        follow = lambda progress: told.put_nowait((progress, threading.get_ident()))  # noqa: E731
        task = asyncio.create_task(loop.generate(request(), replace(PARAMS, log_probs=False), follow))
        while loop.load < 2:
            await asyncio.sleep(0)
        loop.resume()
        for finish in (None, None, "length"):
            stepper.allowed.release()
            progress, thread = await asyncio.wait_for(told.get(), 60)
            assert thread == threading.get_ident()
            assert (progress.versions, progress.log_probs, progress.finish_reason) == ([4], [], finish)
            assert progress.token_ids == [stepper.steps]
            assert finish or not task.done()
        assert (await asyncio.wait_for(task, 60)).token_ids == [1, 2, 3] == (await silent).token_ids

    asyncio.run(scenario())
    loop.close()


def test_an_error_of_who_follows_ends_his_request_alone() -> None:
    loop = loop_over(Counter())

    def follow(progress: Progress) -> None:
        raise KeyError("mine")

    async def scenario() -> None:
        other = asyncio.create_task(loop.generate(request(), PARAMS))
        with pytest.raises(KeyError, match="mine"):
            await asyncio.wait_for(loop.generate(request(), PARAMS, follow), 60)
        assert len((await asyncio.wait_for(other, 60)).token_ids) == 50

    asyncio.run(scenario())
    loop.close()


def test_a_step_that_fails_ends_every_request_with_its_error_and_the_engine_says_so() -> None:
    loop = loop_over(Counter(fails_at=7))

    async def scenario() -> None:
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(loop.generate(request(), PARAMS) for _ in range(9)), return_exceptions=True), 60
        )
        assert all(isinstance(outcome, EngineError) and "the device is gone" in str(outcome) for outcome in outcomes)
        assert loop.load == 0
        with pytest.raises(EngineError, match="must be built again.*the device is gone"):
            await asyncio.wait_for(loop.generate(request(), PARAMS), 60)

    asyncio.run(scenario())
    with pytest.raises(EngineError, match="must be built again"), loop.exclusive("generate"):
        pass
    loop.pause()
    loop.close()


class Picky(Counter):
    """Takes no request named "bad"."""

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        if request.request_id == "bad":
            raise KeyError("no such adapter")
        super().add(key, request, params)


def test_what_a_stepper_does_not_take_ends_that_request_alone() -> None:
    stepper = Picky()
    loop = loop_over(stepper)

    async def scenario() -> None:
        loop.pause()  # until all are there
        names = ["bad", "", "bad", ""]
        tasks = [asyncio.create_task(loop.generate(request(name), PARAMS)) for name in names]
        while loop.load < len(names):
            await asyncio.sleep(0)
        loop.resume()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        for name, one in zip(names, found, strict=True):
            if name:
                assert isinstance(one, RequestError) and "no such adapter" in str(one)
            else:
                assert isinstance(one, Completion) and len(one.token_ids) == 50
        with pytest.raises(RequestError):  # also where it is the only one
            await asyncio.wait_for(loop.generate(request("bad"), PARAMS), 60)
        assert loop.failure == "" and loop.load == 0
        loop.pause()
        tasks = [asyncio.create_task(loop.generate(request(name), PARAMS)) for name in ("bad", "")]
        while loop.load < 2:
            await asyncio.sleep(0)
        stepper.fails_at = stepper.steps + 1
        loop.resume()  # it is told of its fault though the step fails that it would have joined
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert ["no such adapter" in str(one) for one in found] == [True, False] and "the device is gone" in loop.failure

    asyncio.run(scenario())
    loop.close()


def test_closing_ends_waiting_requests_with_an_error() -> None:
    loop = loop_over(Counter())

    async def scenario() -> None:
        loop.pause()
        task = asyncio.create_task(loop.generate(request(), PARAMS))
        await asyncio.sleep(0)
        loop.close()
        with pytest.raises(EngineError, match="shut down"):
            await asyncio.wait_for(task, 60)
        with pytest.raises(EngineError, match="shut down"):
            await loop.generate(request(), PARAMS)

    asyncio.run(scenario())
    loop.close()


def test_the_callers_event_loop_may_end_before_its_requests() -> None:
    stepper = Counter()
    loop = loop_over(stepper)

    async def leave() -> None:
        loop.pause()
        task = asyncio.create_task(loop.generate(request(), PARAMS))
        await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(leave())  # which cancels the task
    loop.resume()
    assert loop.load == 0
    assert asyncio.run(loop.generate(request(), PARAMS)).finish_reason == "length"
    loop.close()


def test_one_user_at_a_time() -> None:
    loop = loop_over(Counter())
    with loop.exclusive("generate"):
        with pytest.raises(EngineError, match="busy with generate"):
            asyncio.run(loop.generate(request(), PARAMS))
        with pytest.raises(EngineError, match="busy with generate"), loop.exclusive("the weight update"):
            pass
        loop.pause()
        with pytest.raises(EngineError, match="before the end of generate"):
            loop.resume()
    loop.resume()
    asyncio.run(loop.generate(request(), PARAMS))
    loop.close()


@pytest.mark.parametrize("changed", [True, False])
def test_keys_and_values_are_computed_anew_only_after_new_weights_and_when_asked_for(changed: bool) -> None:
    stepper = Counter(length=10**9)
    loop = loop_over(stepper)

    async def step_some() -> None:
        seen = stepper.steps
        while stepper.steps < seen + 3:
            await asyncio.sleep(0.001)
        loop.pause()

    async def scenario() -> None:
        task = asyncio.create_task(loop.generate(request(), PARAMS))
        await step_some()
        if changed:
            with loop.exclusive("the weight update", among_requests=True):
                loop.weights_changed()
        loop.resume(recompute=False)
        await step_some()
        assert stepper.recomputed == []
        loop.resume()
        await step_some()
        loop.resume()
        await step_some()
        assert len(stepper.recomputed) == int(changed), "once for each update"
        loop.abort()
        assert len((await task).token_ids) >= 12

    asyncio.run(asyncio.wait_for(scenario(), 60))
    loop.close()
