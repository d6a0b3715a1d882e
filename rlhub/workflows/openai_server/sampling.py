"""From a request's prompt tokens to its choices: all of them at once, cut at stop texts, tool calls found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.workflows.base import EpisodeEngine
from rlhub.workflows.openai_server.answers import Answer, FindCalls, call_object
from rlhub.workflows.openai_server.errors import ApiError
from rlhub.workflows.openai_server.rendering import Renderer


async def sample(
    engine: EpisodeEngine, prompt_ids: list[int], seeds: Sequence[int], params: SamplingParams, session: str, start: int = 0
) -> list[Completion]:
    """One completion a seed.  ApiError 503 where the engine ended one early."""
    requests = [GenerationRequest(prompt_ids=prompt_ids, seed=seed, session=session, start=start) for seed in seeds]
    try:
        async with asyncio.TaskGroup() as group:  # when the client is gone, every one of them is cancelled
            tasks = [group.create_task(engine.agenerate(request, params)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    completions = [task.result() for task in tasks]
    if any(completion.finish_reason == "abort" for completion in completions):
        raise ApiError("the engine ended the request before it was answered", status=503, kind="server_error")
    return completions


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
    if found := [place for item in stop if (place := text.find(item)) >= 0]:
        completion = _cut(completion, renderer, stop)
        text = text[: min(found)]
    answer = Answer(prompt_ids=prompt_ids, completion=completion, text=text)
    if find_calls is not None and (reply := find_calls(text)).calls:
        answer.text, answer.calls = reply.text, [call_object(call) for call in reply.calls]
    return answer


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
