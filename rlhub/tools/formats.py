"""Parses tool calls as models write them.  A reply is never evaluated: text that is not JSON of the right shape is reported as a
problem.

    hermes   <tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call>, any number of them between other
             text (Qwen, Hermes and others are trained on it)
    json     {"name": "calculator", "arguments": {"expression": "2+2"}}, surrounded only by prose or a code fence
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from rlhub.utils.tool_calls import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES = re.compile(rf"{OPEN}(.*?)({CLOSE}|\Z)", re.DOTALL)
MAX_OBJECTS = 16  # looked at in one reply: each failed attempt reads on from its brace, so their number must be bounded
_DECODER = json.JSONDecoder()


@dataclass(slots=True, kw_only=True)
class ParsedReply:
    """A reply and its tool calls.

    text: the reply without its calls.  calls: in the order of the text.  problems: one message for the model per text that looks
    like a call and is none.
    """

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, value: Any) -> None:
        """Adds a decoded object as a call or as a problem."""
        found = as_call(value)
        if isinstance(found, ToolCall):
            self.calls.append(found)
        else:
            self.problems.append(found)


def parse_hermes(text: str) -> ParsedReply:
    """Parses the calls between <tool_call> tags; a tag that is never closed is a problem."""
    reply = ParsedReply(text=HERMES.sub("", text).strip())
    for match in HERMES.finditer(text):
        if not match[2]:
            reply.problems.append("<tool_call> is not closed by </tool_call>")
            continue
        try:
            reply.add(_DECODER.decode(match[1].strip()))
        except (ValueError, RecursionError) as error:
            reply.problems.append(f"not valid JSON between <tool_call> and </tool_call>: {_short(error)}")
    return reply


def parse_json(text: str) -> ParsedReply:
    """Parses every JSON object with a "name" and "arguments" as a call.  Other objects are part of the text; an invalid one that
    begins like a call is a problem."""
    reply = ParsedReply()
    texts, start = [], 0
    for _ in range(MAX_OBJECTS):
        brace = text.find("{", start)
        if brace < 0:
            break
        try:
            value, end = _DECODER.raw_decode(text, brace)
        except (ValueError, RecursionError) as error:
            if re.match(r'\{\s*"name"\s*:', text[brace:]):
                reply.problems.append(f"not a valid JSON object: {_short(error)}")
            value, end = None, brace + 1
        if isinstance(value, dict) and "name" in value and ({"arguments", "parameters"} & value.keys()):
            reply.add(value)
            texts.append(text[start:brace])
        else:
            texts.append(text[start:end])
        start = end
    reply.text = "".join([*texts, text[start:]]).strip()
    return reply


def as_call(value: Any) -> ToolCall | str:
    """Returns a decoded object as a call, or a message that says why it is none."""
    if not isinstance(value, dict):
        return f'a tool call is an object with "name" and "arguments", not a {type(value).__name__}'
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return 'a tool call needs a "name"'
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return f'"arguments" of {name} is a text that is not valid JSON: {_short(error)}'
    if not isinstance(arguments, dict):
        return f'"arguments" of {name} must be an object, not a {type(arguments).__name__}'
    return ToolCall(name=name, arguments=arguments)


def _short(error: BaseException) -> str:
    return str(error)[:120]
