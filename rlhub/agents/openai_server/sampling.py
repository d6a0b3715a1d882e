"""From a request's prompt tokens to its choices: all of them at once, ended at stop texts, tool calls found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rlhub.agents.openai_server.answers import Answer
from rlhub.agents.openai_server.errors import ApiError
from rlhub.agents.openai_server.rendering import Renderer
from rlhub.agents.openai_server.streaming import Choice, Rules
from rlhub.agents.workflows.base import EpisodeEngine
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import DeadlineError

T = TypeVar("T")


async def sample(
    engine: EpisodeEngine, requests: Sequence[GenerationRequest], params: SamplingParams, choices: Sequence[Choice | None]
) -> list[Completion]:
    """One completion a request.  choices: are told of the tokens, and may end their request.  ApiError 503 where the engine
    ended one early."""
    asked = zip(requests, choices, strict=True)
    completions = await gathered(_complete(engine, request, params, choice) for request, choice in asked)
    if any(completion.finish_reason == "abort" for completion in completions):
        raise ApiError("the engine ended the request before it was answered", status=503, kind="server_error")
    return completions


async def gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in their order; all begin at once, in their order.  An error, or the client's leaving, ends all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def in_time(answering: Awaitable[T], seconds: float) -> T:
    """DeadlineError where it is not there after so many seconds."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await answering
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineError("server.request_s: the answer", seconds, "ask for fewer tokens, or raise it") from None


async def _complete(
    engine: EpisodeEngine, request: GenerationRequest, params: SamplingParams, choice: Choice | None
) -> Completion:
    if choice is None:
        return await engine.agenerate(request, params)
    generating = asyncio.ensure_future(engine.agenerate(request, params, choice.follow))
    stopped = asyncio.ensure_future(choice.stopped.wait())
    try:
        await asyncio.wait({generating, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return choice.written if choice.stopped.is_set() else await generating
    finally:
        generating.cancel()
        stopped.cancel()


def as_answer(prompt_ids: list[int], completion: Completion, renderer: Renderer, rules: Rules, choice: Choice | None) -> Answer:
    """The completion as the client reads it.  choice: whose stream told of its calls."""
    text = _text(completion, renderer, rules.stop_token_ids)
    if rules.may_end and rules.complete(text):
        completion = _cut(completion, renderer, rules)
        text = renderer.decode(completion.token_ids)
        text = text[: min((place for item in rules.stop if (place := text.find(item)) >= 0), default=len(text))]
    call_id = (choice or Choice(prompt_ids, rules, lambda: None)).call_id
    answer = Answer(prompt_ids=prompt_ids, completion=completion, written=text, content="", call_id=call_id)
    stream = rules.stream()
    for part in (*stream.add(text), *stream.end()):
        answer.add(part)
    return answer


def ending_token(completion: Completion, stop_token_ids: Sequence[int]) -> int | None:
    """The stop token that ended the answer; None where something else did."""
    last = completion.token_ids[-1] if completion.token_ids else None
    return last if last in stop_token_ids else None


def _text(completion: Completion, renderer: Renderer, stop_token_ids: Sequence[int]) -> str:
    ended = ending_token(completion, stop_token_ids) is not None
    return renderer.decode(completion.token_ids[:-1] if ended else completion.token_ids)


def _cut(completion: Completion, renderer: Renderer, rules: Rules) -> Completion:
    """Up to the token with which the answer is complete: those after it were sampled for nothing."""
    low, high = 1, len(completion.token_ids)
    while low < high:
        middle = (low + high) // 2
        if rules.complete(renderer.decode(completion.token_ids[:middle])):
            high = middle
        else:
            low = middle + 1
    return replace(
        completion,
        token_ids=completion.token_ids[:low],
        log_probs=completion.log_probs[:low],
        versions=completion.versions[:low],
        finish_reason="stop",
    )
