"""The wire /v1/responses: requests as chat requests, and answers as OpenAI's response objects and events.

A response's items are one assistant message of a chat: its reasoning, its text and its calls.  Items that follow each other
become that message again, so that the record is the one that /v1/chat/completions leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhub.agents.openai_server.answers import Answer, WriterParts, usage
from rlhub.agents.openai_server.bodies import REFUSED, ChatBody, Message, read_chat, refuse, renamed
from rlhub.agents.openai_server.errors import ApiError, bad_field, unsupported
from rlhub.agents.openai_server.shaping import SHAPING
from rlhub.agents.openai_server.streaming import Choice, RunningAnswer, StreamPart
from rlhub.tools.call_streams import CallPart, ReasoningPart, ReplyPart

SAME = ("model", "user", "stream", "temperature", "top_p", "parallel_tool_calls", "top_logprobs")
EXTENSIONS = (
    *("seed", "stop", "top_k", "ignore_eos", "stop_token_ids"),
    *(name for name in SHAPING if name != "response_format"),
)
"""Fields of the chat interface that OpenAI's responses do not have."""
RESPONSES = frozenset(
    (*SAME, *EXTENSIONS, "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include")
    + ("previous_response_id", "stream_options")
)
"""The fields that the server reads from a request to this interface."""
RESPONSES_IGNORED = (
    *("metadata", "store", "service_tier", "safety_identifier", "max_tool_calls", "access_programs"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
RESPONSES_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "an answer is sent over the connection that asks for it"),
    "context_management": (([],), "nothing is left out of a conversation here: shorten the input yourself"),
    "conversation": ((), "conversations are kept by their responses: send previous_response_id, or the whole input"),
    "image": ((), REFUSED["audio"][1]),
    "moderation": ((), REFUSED["moderation"][1]),
    "prompt": ((), "no prompts are stored here: send their text"),
    "truncation": (("disabled",), "nothing is left out of a conversation here: shorten the input yourself"),
}
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
"""Field of the chat interface -> the field of this one that becomes it."""
TEXTS = ("input_text", "output_text", "text", "refusal")
LOG_PROBS = "message.output_text.logprobs"
ECHOED = ("instructions", "metadata", "previous_response_id", "tool_choice", "tools", "temperature", "top_p", "max_output_tokens")
Earlier = Callable[[str], Sequence[Message]]
"""Returns the messages of an earlier response's conversation by its id, its answer included."""


@dataclass(slots=True, kw_only=True)
class ResponsesBody(ChatBody):
    """A request to /v1/responses.  num_instructions: the number of messages before those that a later response continues.
    asked: the fields that the response repeats."""

    num_instructions: int = 0
    asked: dict[str, Any] = field(default_factory=dict)

    def conversation(self, answer: Answer) -> list[Message]:
        """Returns the messages with the answer, which a later request may continue."""
        told = {"role": "assistant", "content": answer.content, "tool_calls": answer.calls}
        return [*self.messages[self.num_instructions :], told]


def read_responses(body: dict[str, Any], defaults: Any, earlier: Earlier) -> ResponsesBody:
    """Parses a request to /v1/responses."""
    refuse(body, RESPONSES, RESPONSES_IGNORED, RESPONSES_REFUSED)
    instructions, before = body.get("instructions"), body.get("previous_response_id")
    if instructions is not None and not isinstance(instructions, str):
        raise bad_field("instructions", instructions, "a text")
    first = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*first, *(earlier(str(before)) if before is not None else ()), *read_items(body.get("input"))]
    chat = {name: body[name] for name in (*SAME, *EXTENSIONS) if name in body and name != "top_logprobs"}
    chat |= {
        "messages": messages,
        "max_tokens": body.get("max_output_tokens"),
        **_tools(body),
        **_format(body),
        **_log_probs(body),
    }
    with renamed(NAMES):
        read = read_chat(chat, defaults)
    shared = {name: getattr(read, name) for name in ChatBody.__dataclass_fields__ if name != "names"}
    echoed = {name: body[name] for name in ECHOED if body.get(name) is not None}
    return ResponsesBody(**shared, names=NAMES, num_instructions=len(first), asked=echoed)


def read_items(value: Any) -> list[Message]:
    """Returns the items of an input as chat messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad_field("input", value, "a text or a list of items")
    messages: list[Message] = []
    for index, item in enumerate(value):
        _add_item(messages, f"input[{index}]", item)
    return messages


def _add_item(messages: list[Message], place: str, item: Any) -> None:
    kind = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
    match kind:
        case "message" if item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": text_of(f"{place}.content", item.get("content"))})
        case "message":
            _assistant(messages, "content")["content"] = text_of(f"{place}.content", item.get("content"))
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            told = text_of(f"{place}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": told})
        case "reasoning":
            thoughts = "".join(part.get("text", "") for part in item.get("content") or () if isinstance(part, dict))
            _assistant(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = thoughts
        case _:
            known = "a message, function_call, function_call_output or reasoning"
            raise bad_field(place, item, f"{known}: other items belong to tools that are not here")


def _assistant(messages: list[Message], *new: str) -> Message:
    """Returns the assistant message that the next item belongs to: the last one, or another if
    that has one of the fields `new`."""
    if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(name) for name in new):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def text_of(place: str, content: Any) -> str:
    """Returns the text of a content or of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(place, content, "a text or a list of text parts")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in TEXTS:
            raise bad_field(f"{place}[{index}]", part, "{'type': 'input_text', 'text': ...}: the model reads text only")
    return "".join(str(part.get("refusal" if part["type"] == "refusal" else "text", "")) for part in content)


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list):
        raise bad_field("tools", tools, "a list of function tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise unsupported(f"tools[{index}]", f"got {tool!r:.100}, but only function tools are here: run others in your agent")
    functions = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools]
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tools": functions, "tool_choice": choice}


def _format(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the chat interface for those of `text` and `reasoning`."""
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    for name, value in (("text", text), ("reasoning", reasoning)):
        if not isinstance(value, dict):
            raise bad_field(name, value, "an object")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: item for name, item in form.items() if name != "type"}}
    told = {"response_format": form, "verbosity": text.get("verbosity"), "reasoning_effort": reasoning.get("effort")}
    return {name: value for name, value in told.items() if value is not None}


def _log_probs(body: dict[str, Any]) -> dict[str, Any]:
    include, most = body.get("include") or [], body.get("top_logprobs")
    if not isinstance(include, list):
        raise bad_field("include", include, "a list of names")
    asked = LOG_PROBS in include
    return {"logprobs": asked} | ({"top_logprobs": most} if most and asked else {})


class ResponsesWriter:
    """Writes the response to one request as an object, or as the events of its items.

    A message and the reasoning stay open until the answer ends, because text may follow a call.
    """

    end = b""

    def __init__(self, parts: WriterParts, body: ResponsesBody) -> None:
        self._parts, self._body = parts, body
        self._items: list[dict[str, Any]] = []
        self._open: dict[Any, int] = {}  # "reasoning", "message" or the number of a call -> the place of its item
        self._unsent: list[dict[str, Any]] = []  # log-probs of tokens that came before their text
        self._num_events = 0

    # --- whole -----------------------------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the body of a response that is not streamed."""
        answer = answers[0]
        if answer.reasoning:
            self._add("reasoning")["content"] = [{"type": "reasoning_text", "text": answer.reasoning}]
        if answer.content or not answer.calls:
            self._add("message")["content"] = [_text_part(answer.content)]
        for index, call in enumerate(answer.calls):
            self._add(index, call["id"], **call["function"])
        return self._ended(answer)

    def _ended(self, answer: Answer) -> dict[str, Any]:
        whole = answer.finish_reason != "length"
        for item in self._items:
            item["status"] = "completed"
        if self._items and not whole:
            self._items[-1]["status"] = "incomplete"
        if self._body.log_probs and "message" in self._open:
            self._items[self._open["message"]]["content"][0]["logprobs"] = self._parts.log_probs(answer.completion)
        counts = usage([answer], 1)
        return self._response(
            "completed" if whole else "incomplete",
            output=self._items,
            incomplete_details=None if whole else {"reason": "max_output_tokens"},
            usage={
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        )

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        use = self._body.tool_use
        return {
            "id": f"resp_{self._parts.request_id}",
            "object": "response",
            "created_at": self._parts.created,
            "model": self._parts.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "parallel_tool_calls": not use.one,
            "tools": [],
            "tool_choice": "auto",
            "usage": None,
            **self._body.asked,
            **more,
        }

    def _add(self, key: Any, call_id: str = "", name: str = "", arguments: str = "") -> dict[str, Any]:
        place, ending = len(self._items), self._parts.request_id
        match key:
            case "reasoning":
                item: dict[str, Any] = {"type": "reasoning", "id": f"rs_{ending}_{place}", "summary": [], "content": []}
            case "message":
                item = {"type": "message", "id": f"msg_{ending}_{place}", "role": "assistant", "content": []}
            case _:
                item = {"type": "function_call", "id": f"fc_{ending}_{place}", "call_id": call_id, "name": name}
                item["arguments"] = arguments
        self._items.append({**item, "status": "in_progress"})
        self._open[key] = place
        return self._items[place]

    # --- streamed --------------------------------------------------------------------------------------------------------

    def new_chunks(self, running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the events of what is final and was not sent yet."""
        for choice in running.choices:
            if not choice.begun:
                choice.begun = True
                yield self._event("created", response=self._response("in_progress"))
                yield self._event("in_progress", response=self._response("in_progress"))
            yield from self._written(choice.take(), choice)

    def last_chunks(self, answers: Sequence[Answer], running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the remaining events, once the answer is complete."""
        yield from self.new_chunks(running)
        answer, choice = answers[0], running.choices[0]
        yield from self._written(choice.rest(), choice)
        if not self._items:
            yield from self._begin("message")
        ended = self._ended(answer)
        for place in range(len(self._items)):
            yield from self._close(place)
        yield self._event(ended["status"], response=ended)

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yields the event of a failed response."""
        told = {"code": "server_error", "message": str(error)}
        yield self._event("failed", response=self._response("failed", output=self._items, error=told))

    def _written(self, new: StreamPart, choice: Choice) -> Iterator[dict[str, Any]]:
        self._unsent += self._parts.log_probs(new.tokens) if self._body.log_probs else []
        for part in new.written:
            yield from self._part(part, choice.call_id)

    def _part(self, part: ReplyPart, call_id: Callable[[int], str]) -> Iterator[dict[str, Any]]:
        key: Any = part.index if isinstance(part, CallPart) else "reasoning" if isinstance(part, ReasoningPart) else "message"
        if isinstance(part, CallPart):
            if part.name is not None:
                yield from self._begin(key, call_id(part.index), part.name)
            place, delta = self._open[key], part.arguments
            self._items[place]["arguments"] += delta
            yield self._event("function_call_arguments.delta", **self._at(place), delta=delta)
            return
        if key not in self._open:
            yield from self._begin(key)
        place, delta = self._open[key], part.text if isinstance(part, ReasoningPart) else part
        self._items[place]["content"][0]["text"] += delta
        kind = "reasoning_text.delta" if key == "reasoning" else "output_text.delta"
        more: dict[str, Any] = {}
        if key == "message":
            more, self._unsent = {"logprobs": self._unsent}, []
        yield self._event(kind, **self._at(place), content_index=0, delta=delta, **more)

    def _begin(self, key: Any, call_id: str = "", name: str = "") -> Iterator[dict[str, Any]]:
        item = self._add(key, call_id, name)
        place = self._open[key]
        yield self._event("output_item.added", output_index=place, item=dict(item))
        if item["type"] != "function_call":
            part = {"type": "reasoning_text", "text": ""} if key == "reasoning" else _text_part("")
            yield self._event("content_part.added", **self._at(place), content_index=0, part=dict(part))
            item["content"] = [part]

    def _close(self, place: int) -> Iterator[dict[str, Any]]:
        item = self._items[place]
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **self._at(place), **told)
        else:
            part = item["content"][0]
            kind = "reasoning_text.done" if item["type"] == "reasoning" else "output_text.done"
            more: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": part["logprobs"]}
            yield self._event(kind, **self._at(place), content_index=0, text=part["text"], **more)
            yield self._event("content_part.done", **self._at(place), content_index=0, part=part)
        yield self._event("output_item.done", output_index=place, item=item)

    def _at(self, place: int) -> dict[str, Any]:
        return {"item_id": self._items[place]["id"], "output_index": place}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **more}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
