"""From a request's prompt tokens to its choices: all of them at once, ended at stop texts, tool calls found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.tools.formats import CALL_MARKERS
from rlhub.workflows.base import EpisodeEngine
from rlhub.workflows.openai_server.answers import Answer, FindCalls, call_object
from rlhub.workflows.openai_server.errors import ApiError
from rlhub.workflows.openai_server.rendering import Renderer
from rlhub.workflows.openai_server.streaming import Choice


async def sample(
    engine: EpisodeEngine, requests: Sequence[GenerationRequest], params: SamplingParams, choices: Sequence[Choice] | None
) -> list[Completion]:
    """One completion a request.  choices: are told of the tokens, and may end their request.  ApiError 503 where the engine
    ended one early."""
    followers: Sequence[Choice | None] = choices if choices is not None else [None] * len(requests)
    asked = zip(requests, followers, strict=True)
    try:
        async with asyncio.TaskGroup() as group:  # when the client is gone, every one of them is cancelled
            tasks = [group.create_task(_complete(engine, request, params, choice)) for request, choice in asked]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    completions = [task.result() for task in tasks]
    if any(completion.finish_reason == "abort" for completion in completions):
        raise ApiError("the engine ended the request before it was answered", status=503, kind="server_error")
    return completions


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


def as_answer(
    prompt_ids: list[int],
    completion: Completion,
    renderer: Renderer,
    *,
    stop: Sequence[str],
    stop_token_ids: Sequence[int],
    find_calls: FindCalls | None,
) -> Answer:
    """The completion as the client reads it."""
    text = _text(completion, renderer, stop_token_ids)
    if any(item in text for item in stop):
        completion = _cut(completion, renderer, stop)
        text = renderer.decode(completion.token_ids)
        text = text[: min(place for item in stop if (place := text.find(item)) >= 0)]
    answer = Answer(prompt_ids=prompt_ids, completion=completion, text=text)
    if find_calls is not None and (reply := find_calls(text)).calls:
        # A stream has told the spaces before the text when the first call comes.
        spaces = text[: len(text) - len(text.lstrip())] if reply.text and call_marker(find_calls) else ""
        answer.text, answer.calls = spaces + reply.text, [call_object(call) for call in reply.calls]
    return answer


def call_marker(find_calls: FindCalls | None) -> str | None:
    """As in Rules."""
    return CALL_MARKERS.get(find_calls, "") if find_calls is not None else None


def ending_token(completion: Completion, stop_token_ids: Sequence[int]) -> int | None:
    """The stop token that ended the answer; None where something else did."""
    last = completion.token_ids[-1] if completion.token_ids else None
    return last if last in stop_token_ids else None


def _text(completion: Completion, renderer: Renderer, stop_token_ids: Sequence[int]) -> str:
    ended = ending_token(completion, stop_token_ids) is not None
    return renderer.decode(completion.token_ids[:-1] if ended else completion.token_ids)


def _cut(completion: Completion, renderer: Renderer, stop: Sequence[str]) -> Completion:
    """Up to the token with which a stop text is complete: the tokens after it were sampled for nothing."""
    low, high = 1, len(completion.token_ids)
    while low < high:
        middle = (low + high) // 2
        text = renderer.decode(completion.token_ids[:middle])
        if any(item in text for item in stop):
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
