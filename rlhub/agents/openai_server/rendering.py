"""Renders chat messages to prompt tokens, samples all choices of an answer at once, and reads stop texts and tool calls in them.

A first turn renders the whole conversation; a later turn renders only the messages between two answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rlhub.agents.openai_server.answers import Answer
from rlhub.agents.openai_server.bodies import Message
from rlhub.agents.openai_server.errors import ApiError
from rlhub.agents.openai_server.streaming import Choice, Rules
from rlhub.agents.workflows.base import EpisodeEngine
from rlhub.agents.workflows.turns import TurnTemplate
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import ConfigError, DeadlineError


class Renderer:
    """Renders messages with the policy's tokenizer.  Without a chat template the contents of the messages are concatenated."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        # No roles: a template that cannot go on after an answer only means that each request is a segment of its own.
        self._turns = TurnTemplate(tokenizer, roles=(), kwargs=template_kwargs) if tokenizer.chat_template else None

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Returns the tokens of the whole conversation up to the beginning of the answer.  Raises ApiError if the template
        refuses it."""
        if self._turns is None:
            return self.text_ids("".join(message["content"] for message in messages), special=True)
        try:
            return self.text_ids(self._turns.prompt(self._plain(messages), tools), special=False)
        except ConfigError as error:
            raise ApiError(f"messages: {error}", param="messages") from error

    def added(self, new: Sequence[Message], *, turn_ended: bool) -> list[int] | None:
        """Returns the tokens between an answer and the next one, or None if the template cannot continue after an answer.

        turn_ended: the policy sampled the end-of-turn token itself.
        """
        if self._turns is None:
            return self.text_ids("".join(message["content"] for message in new), special=False)
        try:
            return self._turns.between(self._plain(new), turn_ended=turn_ended)
        except ConfigError:
            return None

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with roles that templates know; special tokens in a tool's output are broken up, so it cannot end
        its own turn."""
        assert self._turns is not None
        made = []
        for message in messages:
            match message["role"]:
                case "developer":
                    made.append({**message, "role": "system"})
                case "tool":
                    made.append({**message, "content": self._turns.neutral(message["content"])})
                case _:
                    made.append(message)
        return made

    def text_ids(self, text: str, *, special: bool) -> list[int]:
        """Returns the tokens of a text.  special: include the tokens that the tokenizer adds around a text."""
        return list(self._tokenizer([text], add_special_tokens=special)["input_ids"][0])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens with special tokens, which parsers of libraries look for."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        """Returns the text of one token."""
        return str(self._tokenizer.decode([token_id]))


T = TypeVar("T")


async def sample(
    engine: EpisodeEngine, requests: Sequence[GenerationRequest], params: SamplingParams, choices: Sequence[Choice | None]
) -> list[Completion]:
    """Returns one completion per request.  Raises ApiError 503 if the engine ended a request early.

    choices: receive the tokens of their request while it runs, and may end it early; None for a request without a stream or stop
    text.
    """
    asked = zip(requests, choices, strict=True)
    completions = await gathered(_complete(engine, request, params, choice) for request, choice in asked)
    if any(completion.finish_reason == "abort" for completion in completions):
        raise ApiError("the engine ended the request before it was answered", status=503, kind="server_error")
    return completions


async def gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently, started in their order, and returns their results in that order.  An error, or the
    disconnection of the client, cancels all of them."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def in_time(answering: Awaitable[T], seconds: float) -> T:
    """Returns the result of `answering`.  Raises DeadlineError after `seconds`."""
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


def as_answer(prompt_ids: list[int], completion: Completion, rules: Rules, choice: Choice | None) -> Answer:
    """Returns the completion as an answer, cut at stop texts and with its tool calls parsed.  choice: has the ids of the calls
    that were streamed already; None where nothing was streamed."""
    text, stop_text = _text(completion, rules), ""
    if rules.may_end and rules.complete(text):
        completion = _cut(completion, rules)
        text = rules.decode(completion.token_ids)
        end, stop_text = min(((place, item) for item in rules.stop if (place := text.find(item)) >= 0), default=(len(text), ""))
        text = text[:end]
    choice = choice or Choice(prompt_ids, rules, lambda: None)
    answer = Answer(
        prompt_ids=prompt_ids, completion=completion, written=text, content="", call_id=choice.call_id, stop_text=stop_text
    )
    for part in choice.end(text, completion):
        answer.add(part)
    return answer


def ending_token(completion: Completion, stop_token_ids: Sequence[int]) -> int | None:
    """Returns the stop token that ended the answer, or None if something else did."""
    last = completion.token_ids[-1] if completion.token_ids else None
    return last if last in stop_token_ids else None


def _text(completion: Completion, rules: Rules) -> str:
    ended = ending_token(completion, rules.stop_token_ids) is not None
    return rules.decode(completion.token_ids[:-1] if ended else completion.token_ids)


def _cut(completion: Completion, rules: Rules) -> Completion:
    """Returns the completion up to the token that completes the answer; the tokens after it are dropped."""
    low, high = 1, len(completion.token_ids)
    while low < high:
        middle = (low + high) // 2
        if rules.complete(rules.decode(completion.token_ids[:middle])):
            high = middle
        else:
            low = middle + 1
    return replace(completion.between(0, low), finish_reason="stop")
