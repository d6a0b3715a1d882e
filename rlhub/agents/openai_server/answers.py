"""Writes answers of the endpoint as OpenAI's JSON: whole, or as the chunks of a stream as soon as their content is final.

`token_ids`, `prompt_token_ids` and `token_versions` are extensions, which only a request with `return_token_ids` gets.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from aiohttp import web

from rlhub.agents.openai_server.bodies import ChatBody, CompletionBody, Message, RequestBody, read_arguments
from rlhub.agents.openai_server.errors import ApiError, as_api_error
from rlhub.agents.openai_server.streaming import Choice, RunningAnswer, StreamPart
from rlhub.engines.rollout.base import Completion, SampledTokens, TopLogProbs
from rlhub.tools.call_streams import ReasoningPart, ReplyPart

logger = logging.getLogger(__name__)

ID_BYTES = 12
HEARTBEAT_S = 10.0  # below the minute after which proxies commonly close a silent connection


@dataclass(slots=True, kw_only=True)
class Answer:
    """One choice of a response.

    written: the whole text.  content: the text without tool calls and reasoning.  call_id: returns the id of the call with a
    given index.  calls: OpenAI's tool_calls objects.  reasoning: what a reasoning parser takes for the model's thoughts.
    stop_text: the stop text that ended it, or "".
    """

    prompt_ids: list[int]
    completion: Completion
    written: str
    content: str
    call_id: Callable[[int], str]
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    stop_text: str = ""

    def add(self, part: ReplyPart) -> None:
        """Appends the next part of the text, of the reasoning or of a tool call."""
        if isinstance(part, str):
            self.content += part
            return
        if isinstance(part, ReasoningPart):
            self.reasoning += part.text
            return
        if part.name is not None:
            self.calls.append(call_object(self.call_id(part.index), part.name))
        self.calls[part.index]["function"]["arguments"] += part.arguments

    @property
    def finish_reason(self) -> str:
        """Returns OpenAI's finish_reason, which is "tool_calls" for a complete answer with calls."""
        return "tool_calls" if self.calls and self.completion.finish_reason == "stop" else self.completion.finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """Returns the message of the response; clients send it back in their history."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content or ("" if not self.calls else None), "refusal": None}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        return {**made, "tool_calls": self.calls} if self.calls else made

    @property
    def recorded(self) -> Message:
        """Returns the message in the form in which a later request's history contains it."""
        made: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            made["tool_calls"] = [
                {"function": {**call["function"], "arguments": read_arguments(call["function"]["arguments"])}}
                for call in self.calls
            ]
        return made


def call_object(call_id: str, name: str, arguments: str = "") -> dict[str, Any]:
    """Returns OpenAI's object of a tool call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class AnswerWriter(Protocol):
    """Writes the response to one request in the form of one interface.

    end: the last bytes of a stream.
    """

    end: bytes

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the body of a response that is not streamed."""
        ...

    def new_chunks(self, running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the chunks of the running answers whose content is final and was not sent yet."""
        ...

    def last_chunks(self, answers: Sequence[Answer], running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the remaining chunks of all answers, once all of them are complete."""
        ...

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yields the last chunks of a stream that an error ends."""
        ...


@dataclass(slots=True, kw_only=True)
class WriterParts:
    """The parts of every AnswerWriter.

    token, text: return a token id, and token ids, as text.  request_id: the part after the prefix of the response's id.
    """

    model: str
    token: Callable[[int], str]
    text: Callable[[Sequence[int]], str]
    request_id: str
    created: int

    def log_probs(self, tokens: SampledTokens) -> list[dict[str, Any]]:
        """Returns the log-probs of tokens, each with the likeliest in its place, as OpenAI's objects."""
        tops = tokens.top_log_probs or [[] for _ in tokens.token_ids]
        return [
            {**self._log_prob(token, value), "top_logprobs": [self._log_prob(*pair) for pair in top]}
            for token, value, top in zip(tokens.token_ids, tokens.log_probs, tops, strict=True)
        ]

    def _log_prob(self, token_id: int, value: float) -> dict[str, Any]:
        token = self.token(token_id)
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    def columns(self, places: Sequence[tuple[int, float | None, TopLogProbs]], offset: int, *, tops: bool) -> dict[str, Any]:
        """Returns the log-probs of tokens as OpenAI's object of /v1/completions.

        places: a token's id, its log-prob and the likeliest in its place.  offset: of the first token, in characters.
        """
        tokens = [self.token(token) for token, _, _ in places]
        return {
            "tokens": tokens,
            "token_logprobs": [value for _, value, _ in places],
            "top_logprobs": [self._by_text(*place) for place in places] if tops else None,
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
        }

    def _by_text(self, token_id: int, value: float | None, top: TopLogProbs) -> dict[str, float] | None:
        """Returns the likeliest tokens, and the one that is there, by their texts; None for a prompt's first token.  Of tokens
        with the same text the likeliest counts."""
        if value is None:
            return None
        found: dict[str, float] = {}
        for token, likely in (*top, (token_id, value)):
            found.setdefault(self.token(token), likely)
        return found


class Writer:
    """Writes the responses to one request to /chat/completions or /completions."""

    end = b"data: [DONE]\n\n"

    def __init__(self, parts: WriterParts, body: RequestBody) -> None:
        self._parts, self._body, self._chat, self._n = parts, body, isinstance(body, ChatBody), body.n
        self._log_probs_wanted, self._token_ids, self._usage_chunk = body.log_probs, body.token_ids, body.usage_chunk

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the body of a response that is not streamed."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = {**self._head(chunk=False), "choices": choices, "usage": usage(answers, self._n)}
        return {**body, "prompt_token_ids": answers[0].prompt_ids} if self._chat and self._token_ids else body

    def new_chunks(self, running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the chunks of the running answers whose content is final and was not sent yet."""
        for index, choice in enumerate(running.choices):
            yield from map(self._chunk, self._piece(index, choice, choice.take()))

    def last_chunks(self, answers: Sequence[Answer], running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the remaining chunks of all answers, once all of them are complete."""
        for index, (answer, choice) in enumerate(zip(answers, running.choices, strict=True)):
            yield from map(self._chunk, self._piece(index, choice, choice.rest()))
            yield from map(self._chunk, self._end(index, answer, choice))
        if self._usage_chunk:
            yield {**self._head(chunk=True), "choices": [], "usage": usage(answers, self._n)}

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yields the error as an event; OpenAI's clients raise it."""
        yield error.body

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        made = {**self._head(chunk=True), "choices": [choice]}
        return {**made, "usage": None} if self._usage_chunk else made

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self._chat else "text_completion"
        prefix = "chatcmpl" if self._chat else "cmpl"
        return {
            "id": f"{prefix}-{self._parts.request_id}",
            "object": kind,
            "created": self._parts.created,
            "model": self._parts.model,
        }

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        echo, written = self._echo(index), answer.completion
        content = {"message": answer.message} if self._chat else {"text": (echo or "") + answer.content}
        return {
            "index": index,
            **content,
            "logprobs": self._log_probs(written, 0, () if echo is None else answer.prompt_ids),
            "finish_reason": answer.finish_reason,
            **self._extension(written, None if self._chat else answer.prompt_ids),
        }

    def _piece(self, index: int, choice: Choice, part: StreamPart) -> Iterator[dict[str, Any]]:
        told = [self._content(choice, written) for written in part.written]
        if not told and not (part.tokens.token_ids and (self._log_probs_wanted or self._token_ids)):
            return
        yield from self._begin(index, choice)
        first, *others = told or [self._content(choice, "")]
        yield self._delta(
            index,
            first,
            logprobs=self._log_probs(part.tokens, choice.offset),
            **self._extension(part.tokens, choice.prompt_ids if part.start == 0 else None),
        )
        yield from (self._delta(index, other) for other in others)
        self._move(choice, part.tokens.token_ids)

    def _content(self, choice: Choice, written: ReplyPart) -> dict[str, Any]:
        if not self._chat:
            return {"text": written}
        if isinstance(written, str):
            return {"delta": {"content": written}}
        if isinstance(written, ReasoningPart):
            return {"delta": {"reasoning_content": written.text}}
        if written.name is None:
            call: dict[str, Any] = {"function": {"arguments": written.arguments}}
        else:
            call = call_object(choice.call_id(written.index), written.name, written.arguments)
        return {"delta": {"tool_calls": [{"index": written.index, **call}]}}

    def _end(self, index: int, answer: Answer, choice: Choice) -> Iterator[dict[str, Any]]:
        yield from self._begin(index, choice)
        yield self._delta(index, {"delta": {}} if self._chat else {"text": ""}, finish_reason=answer.finish_reason)

    def _begin(self, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
        if choice.begun:
            return
        choice.begun = True
        if self._chat:
            yield self._delta(index, {"delta": {"role": "assistant", "content": ""}})
        elif (echo := self._echo(index)) is not None:
            log_probs = self._log_probs(choice.written.between(0, 0), 0, choice.prompt_ids)
            yield self._delta(index, {"text": echo}, logprobs=log_probs)
            self._move(choice, choice.prompt_ids)

    def _echo(self, index: int) -> str | None:
        """Returns the text of the prompt with which an answer begins, or None if it does not."""
        body = self._body
        if not isinstance(body, CompletionBody) or not body.echo:
            return None
        prompt = body.prompts[index // body.n]
        return prompt if isinstance(prompt, str) else self._parts.text(prompt)

    def _move(self, choice: Choice, sent: Sequence[int]) -> None:
        """Counts the characters of the tokens sent, where log-probs name their place."""
        if self._log_probs_wanted and not self._chat:
            choice.offset += sum(len(self._parts.token(token)) for token in sent)

    def _delta(self, index: int, content: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": None, **more}

    def _extension(self, written: Completion, prompt_ids: list[int] | None) -> dict[str, Any]:
        if not self._token_ids:
            return {}
        made: dict[str, Any] = {"token_ids": written.token_ids, "token_versions": written.versions}
        return {**made, "prompt_token_ids": prompt_ids} if prompt_ids is not None else made

    def _log_probs(self, tokens: SampledTokens, offset: int, prompt_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """Returns the log-probs of tokens, after those of the prompt where it is echoed."""
        if not self._log_probs_wanted:
            return None
        if self._chat:
            return {"content": self._parts.log_probs(tokens), "refusal": None}
        tops, prompt = tokens.top_log_probs or [[] for _ in tokens.token_ids], [(None, []), *tokens.prompt_log_probs]
        places = [(token, *place) for token, place in zip(prompt_ids, prompt if prompt_ids else (), strict=True)]
        places += zip(tokens.token_ids, tokens.log_probs, tops, strict=True)
        return self._parts.columns(places, offset, tops=self._body.top_log_probs > 0)


def usage(answers: Sequence[Answer], n: int) -> dict[str, int]:
    """Returns the token counts of the request; a prompt counts once for its `n` answers."""
    prompt = sum(len(answer.prompt_ids) for answer in answers[::n])
    written = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


async def send_whole(request: web.Request, answer: dict[str, Any], write_s: float) -> web.StreamResponse:
    """Writes the response in one piece."""
    body, response = json.dumps(answer).encode(), web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    response.content_length = len(body)
    await response.prepare(request)
    await _write(request, response, body, write_s)
    return response


async def send_stream(
    request: web.Request, writer: AnswerWriter, answering: Awaitable[list[Answer]], running: RunningAnswer, write_s: float
) -> web.StreamResponse:
    """Writes server-sent events as soon as their content is final.  When there are none, comments keep the connection open and
    detect a client that has disconnected. write_s: see `_write`."""
    task = asyncio.ensure_future(answering)
    task.add_done_callback(lambda _: running.notify())
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    clock = task.get_loop().time
    written_at = clock()
    try:
        await running.news(HEARTBEAT_S)
        if task.done():
            task.result()  # an error of its first moments is an answer with its own status
        await response.prepare(request)
        while not task.done():
            told = _events(writer.new_chunks(running))
            if not told and clock() - written_at >= HEARTBEAT_S:
                told = b": working\n\n"
            if told:
                await _write(request, response, told, write_s)
                written_at = clock()
            await running.news(HEARTBEAT_S)
        await _write(request, response, _last_events(request, task, writer, running), write_s)
        await response.write_eof()
    except ConnectionResetError:
        if not response.prepared:
            raise
        logger.debug("%s: the client left", request.path)
    finally:
        task.cancel()
    return response


def _last_events(request: web.Request, task: asyncio.Future[list[Answer]], writer: AnswerWriter, running: RunningAnswer) -> bytes:
    try:
        answers = task.result()
    except Exception as error:  # noqa: BLE001  the request's boundary: its status is sent, so an event tells of the error
        return _events(writer.failed(as_api_error(request, error)))
    return _events(writer.last_chunks(answers, running)) + writer.end


def _events(told: Iterable[dict[str, Any]]) -> bytes:
    """Returns chunks as server-sent events; one with a type is an event of that name."""
    heads = ((f"event: {event['type']}\n" if "type" in event else "", event) for event in told)
    return b"".join(f"{head}data: {json.dumps(event)}\n\n".encode() for head, event in heads)


async def _write(request: web.Request, response: web.StreamResponse, told: bytes, seconds: float) -> None:
    """Writes to the client.  If it does not read the data within `seconds`, aborts the connection and raises
    ConnectionResetError."""
    try:
        async with asyncio.timeout(seconds):
            await response.write(told)
    except TimeoutError:
        logger.info("%s: the client has read nothing for %g s (server.connection_s)", request.path, seconds)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None
