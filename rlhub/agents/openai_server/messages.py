"""The wire /v1/messages: requests of Anthropic's client as chat requests, and answers as its messages and events.

Blocks of text, calls and thinking in a message of the assistant are one chat message; each result of a tool is one.  The record
is therefore the one that /v1/chat/completions leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhub.agents.openai_server.answers import Answer, WriterParts
from rlhub.agents.openai_server.bodies import (
    ChatBody,
    Message,
    read_arguments,
    read_chat,
    read_flag,
    refuse,
    renamed,
)
from rlhub.agents.openai_server.errors import ApiError, bad_field, unsupported
from rlhub.agents.openai_server.streaming import Choice, RunningAnswer
from rlhub.tools.call_streams import CallPart, ReasoningPart, ReplyPart

SAME = ("model", "stream", "temperature", "top_p", "max_tokens", "top_k", "seed", "ignore_eos", "stop_token_ids")
MESSAGES = frozenset((*SAME, "messages", "system", "stop_sequences", "tools", "tool_choice", "output_config"))
"""The fields that the server reads from a request to this interface."""
MESSAGES_IGNORED = (
    *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id"),
    "thinking",
)
"""Fields that do not change the answer.  `thinking` allows thoughts; whether a model has any is up to its chat template."""
MESSAGES_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "there are no containers here: run tools in your agent"),
    "context_management": ((), "nothing is left out of a conversation here: shorten the messages yourself"),
    "mcp_servers": (([],), "run tools in your agent"),
}
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "reasoning_effort": "output_config.effort"}
"""Field of the chat interface -> the field of this one that becomes it."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
UNREADABLE = "unreadable_json"
"""The only key of a call's input whose arguments, its value, are no JSON object; clients send it back."""


def read_messages(body: dict[str, Any], defaults: Any) -> ChatBody:
    """Parses a request to /v1/messages or /v1/messages/count_tokens."""
    refuse(body, MESSAGES, MESSAGES_IGNORED, MESSAGES_REFUSED)
    chat = {name: body[name] for name in SAME if name in body}
    chat |= {"messages": _messages(body), "stop": body.get("stop_sequences"), **_tools(body), **_format(body)}
    with renamed(NAMES):
        read = read_chat(chat, defaults)
    read.names = NAMES
    return read


def _messages(body: dict[str, Any]) -> list[Message]:
    given, system = body.get("messages"), body.get("system")
    if not isinstance(given, list) or not given:
        raise bad_field("messages", given, "a list of at least one message")
    messages: list[Message] = [{"role": "system", "content": _text("system", system)}] if system else []
    for index, item in enumerate(given):
        place, role = f"messages[{index}]", item.get("role") if isinstance(item, dict) else item
        match role:
            case "assistant":
                messages.append(_assistant(place, item.get("content")))
            case "user":
                messages += _user(place, item.get("content"))
            case "system":
                messages.append({"role": "system", "content": _text(f"{place}.content", item.get("content"))})
            case _:
                raise bad_field(f"{place}.role", role, "user, assistant or system")
    if messages[-1]["role"] == "assistant":
        raise ApiError("messages: the last one is the assistant's; an answer cannot be begun by the request", param="messages")
    return messages


def _user(place: str, content: Any) -> Iterator[Message]:
    """Yields the messages of a user's turn: each result of a tool is one, and so is the text between them."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    text: list[str] = []
    for index, block in enumerate(_blocks(place, content)):
        if block.get("type") != "tool_result":
            text.append(_text(f"{place}.content[{index}]", [block]))
            continue
        if text:
            yield {"role": "user", "content": "".join(text)}
            text = []
        told = _text(f"{place}.content[{index}].content", block.get("content") or "")
        yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": told}
    if text:
        yield {"role": "user", "content": "".join(text)}


def _assistant(place: str, content: Any) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    if isinstance(content, str):
        return {**message, "content": content}
    for index, block in enumerate(_blocks(place, content)):
        match block.get("type"):
            case "tool_use":
                function = {"name": block.get("name"), "arguments": _arguments(block.get("input"))}
                call = {"id": block.get("id"), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
            case "redacted_thinking":
                continue
            case _:
                message["content"] += _text(f"{place}.content[{index}]", [block])
    return message


def _blocks(place: str, content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_field(f"{place}.content", content, "a text or a list of content blocks")
    return content


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise bad_field(place, block, "{'type': 'text', 'text': ...}: the model reads text only")
    return "".join(block["text"] for block in content)


def _arguments(given: Any) -> Any:
    return given[UNREADABLE] if isinstance(given, dict) and list(given) == [UNREADABLE] else given


def _input(arguments: str) -> dict[str, Any]:
    """Returns a call's arguments as the object that a tool_use block has."""
    found = read_arguments(arguments)
    return found if isinstance(found, dict) else {UNREADABLE: arguments}


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    tools, choice = body.get("tools") or [], body.get("tool_choice") or {"type": "auto"}
    if not isinstance(tools, list):
        raise bad_field("tools", tools, "a list of tools with name and input_schema")
    functions = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise unsupported(f"tools[{index}]", f"got {tool!r:.100}, but the server has no tools: run them in your agent")
        schema = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
        functions.append({"type": "function", "function": schema})
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind != "tool" and kind not in CHOICES:
        raise bad_field("tool_choice", choice, "{'type': 'auto' | 'any' | 'none'} or {'type': 'tool', 'name': ...}")
    named = {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else CHOICES[str(kind)]
    one = read_flag(choice, "disable_parallel_tool_use", within="tool_choice.")
    return {"tools": functions, "tool_choice": named, "parallel_tool_calls": not one}


def _format(body: dict[str, Any]) -> dict[str, Any]:
    config = body.get("output_config") or {}
    if not isinstance(config, dict):
        raise bad_field("output_config", config, "an object")
    form = config.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}
    told = {"response_format": form, "reasoning_effort": config.get("effort")}
    return {name: value for name, value in told.items() if value is not None}


class MessagesWriter:
    """Writes the answer to one request as a message, or as the events of its content blocks, one after another."""

    end = b""

    def __init__(self, parts: WriterParts, body: ChatBody) -> None:
        self._parts = parts
        self._num_blocks = 0
        self._kind = ""  # of the block that is open

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the body of a response that is not streamed."""
        answer = answers[0]
        thoughts = [{"type": "thinking", "thinking": answer.reasoning, "signature": ""}] if answer.reasoning else []
        text = [{"type": "text", "text": answer.content}] if answer.content else []
        content = [*thoughts, *text]
        for call in answer.calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
            content.append(block)
        return {**self._message(answer.prompt_ids, len(answer.completion.token_ids)), "content": content, **_ending(answer)}

    def _message(self, prompt_ids: Sequence[int], num_written: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self._parts.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._parts.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(prompt_ids), "output_tokens": num_written},
        }

    def new_chunks(self, running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the events of what is final and was not sent yet."""
        for choice in running.choices:
            if not choice.begun:
                choice.begun = True
                yield {"type": "message_start", "message": self._message(choice.prompt_ids, 0)}
            for part in choice.take().written:
                yield from self._part(part, choice)

    def last_chunks(self, answers: Sequence[Answer], running: RunningAnswer) -> Iterator[dict[str, Any]]:
        """Yields the remaining events, once the answer is complete."""
        yield from self.new_chunks(running)
        answer, choice = answers[0], running.choices[0]
        for part in choice.rest().written:
            yield from self._part(part, choice)
        yield from self._close()
        counts = {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.completion.token_ids)}
        yield {"type": "message_delta", "delta": _ending(answer), "usage": counts}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yields the error as an event, which Anthropic's client raises."""
        yield error.messages_body

    def _part(self, part: ReplyPart, choice: Choice) -> Iterator[dict[str, Any]]:
        if isinstance(part, CallPart):
            if part.name is not None:
                call = {"type": "tool_use", "id": choice.call_id(part.index), "name": part.name, "input": {}}
                yield from self._begin(call)
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        elif isinstance(part, ReasoningPart):
            if self._kind != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        else:
            if self._kind != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._num_blocks, self._kind = self._num_blocks + 1, block["type"]
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._kind:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._kind = ""

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}


def _ending(answer: Answer) -> dict[str, Any]:
    if answer.stop_text and answer.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_text}
    return {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}
