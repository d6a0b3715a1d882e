"""Writes answers of the endpoint as OpenAI's JSON: whole, or as the chunks of a stream as soon as their content is final.

`token_ids`, `prompt_token_ids` and `token_versions` are extensions, which only a request with `return_token_ids` gets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rlhub.agents.openai_server.bodies import Message, read_arguments
from rlhub.agents.openai_server.errors import as_api_error
from rlhub.agents.openai_server.streaming import Choice, RunningAnswer, StreamPart
from rlhub.engines.rollout.base import Completion
from rlhub.tools.call_streams import CallPart

logger = logging.getLogger(__name__)

ID_BYTES = 12
HEARTBEAT_S = 10.0  # below the minute after which proxies commonly close a silent connection


@dataclass(slots=True, kw_only=True)
class Answer:
    """One choice of a response.

    written: the whole text.  content: the text without tool calls.  call_id: returns the id of the call with a given index.
    calls: OpenAI's tool_calls objects.
    """

    prompt_ids: list[int]
    completion: Completion
    written: str
    content: str
    call_id: Callable[[int], str]
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: str | CallPart) -> None:
        """Appends the next part of the text or of a tool call."""
        if isinstance(part, str):
            self.content += part
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


@dataclass(slots=True, kw_only=True)
class Writer:
    """Writes the responses to one request.

    chat: True for /chat/completions, False for /completions.  token: returns a token id as text.  n: the number of answers per
    prompt.  request_id: the part after the dash of the response's id.
    """

    model: str
    chat: bool
    token: Callable[[int], str]
    log_probs: bool
    token_ids: bool
    usage_chunk: bool = False
    request_id: str
    n: int = 1
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the body of a response that is not streamed."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = {**self._head(chunk=False), "choices": choices, "usage": usage(answers, self.n)}
        return {**body, "prompt_token_ids": answers[0].prompt_ids} if self.chat and self.token_ids else body

    def new_chunks(self, running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the chunks of the running answers whose content is final and was not sent yet."""
        for index, choice in enumerate(running.choices):
            yield from map(self._chunk, self._piece(index, choice, choice.take()))

    def last_chunks(self, answers: Sequence[Answer], running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the remaining chunks of all answers, once all of them are complete."""
        for index, (answer, choice) in enumerate(zip(answers, running.choices, strict=True)):
            yield from map(self._chunk, self._piece(index, choice, choice.rest(answer.written, answer.completion)))
            yield from map(self._chunk, self._end(index, answer, choice))
        if self.usage_chunk:
            yield {**self._head(chunk=True), "choices": [], "usage": usage(answers, self.n)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        made = {**self._head(chunk=True), "choices": [choice]}
        return {**made, "usage": None} if self.usage_chunk else made

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.request_id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        content = {"message": answer.message} if self.chat else {"text": answer.content}
        written = answer.completion
        return {
            "index": index,
            **content,
            "logprobs": self._log_probs(written.token_ids, written.log_probs, 0),
            "finish_reason": answer.finish_reason,
            **self._extension(written, None if self.chat else answer.prompt_ids),
        }

    def _piece(self, index: int, choice: Choice, part: StreamPart) -> Iterator[dict[str, Any]]:
        told = [self._content(choice, written) for written in part.written]
        if not told and not (part.token_ids and (self.log_probs or self.token_ids)):
            return
        yield from self._begin(index, choice)
        first, *others = told or [self._content(choice, "")]
        yield self._delta(
            index,
            first,
            logprobs=self._log_probs(part.token_ids, part.log_probs, choice.offset),
            **self._extension(part, choice.prompt_ids if part.start == 0 else None),
        )
        yield from (self._delta(index, other) for other in others)
        if self.log_probs and not self.chat:
            choice.offset += sum(len(self.token(token)) for token in part.token_ids)

    def _content(self, choice: Choice, written: str | CallPart) -> dict[str, Any]:
        if not self.chat:
            return {"text": written}
        if isinstance(written, str):
            return {"delta": {"content": written}}
        if written.name is None:
            call: dict[str, Any] = {"function": {"arguments": written.arguments}}
        else:
            call = call_object(choice.call_id(written.index), written.name, written.arguments)
        return {"delta": {"tool_calls": [{"index": written.index, **call}]}}

    def _end(self, index: int, answer: Answer, choice: Choice) -> Iterator[dict[str, Any]]:
        yield from self._begin(index, choice)
        yield self._delta(index, {"delta": {}} if self.chat else {"text": ""}, finish_reason=answer.finish_reason)

    def _begin(self, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
        if self.chat and not choice.begun:
            yield self._delta(index, {"delta": {"role": "assistant", "content": ""}})
        choice.begun = True

    def _delta(self, index: int, content: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": None, **more}

    def _extension(self, written: Completion | StreamPart, prompt_ids: list[int] | None) -> dict[str, Any]:
        if not self.token_ids:
            return {}
        made: dict[str, Any] = {"token_ids": written.token_ids, "token_versions": written.versions}
        return {**made, "prompt_token_ids": prompt_ids} if prompt_ids is not None else made

    def _log_probs(self, ids: Sequence[int], log_probs: Sequence[float], offset: int) -> dict[str, Any] | None:
        if not self.log_probs:
            return None
        tokens = [self.token(token) for token in ids]
        if not self.chat:
            offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
            return {"tokens": tokens, "token_logprobs": list(log_probs), "top_logprobs": None, "text_offset": offsets}
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, log_probs, strict=True)
        ]
        return {"content": content, "refusal": None}


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
    request: web.Request, writer: Writer, answering: Awaitable[list[Answer]], running: RunningAnswer, write_s: float
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


def _last_events(request: web.Request, task: asyncio.Future[list[Answer]], writer: Writer, running: RunningAnswer) -> bytes:
    try:
        answers = task.result()
    except Exception as error:  # noqa: BLE001  the request's boundary: its status is sent, so an event tells of the error
        return _events([as_api_error(request, error).body])
    return _events(writer.last_chunks(answers, running)) + b"data: [DONE]\n\n"


def _events(told: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in told)


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
