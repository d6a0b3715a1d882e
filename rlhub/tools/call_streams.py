"""Parses tool calls from a reply while it is generated: each part is returned, as text or as part of a call, as soon as it is
final.

A returned part is never taken back, so a call begins once its name is known and its arguments have begun as an object.  From
there on the arguments are returned as the model writes them, even if they turn out to be invalid or incomplete, as OpenAI's
service does.  A call in any other order is returned when it is complete.  Text that only looks like a call is text, and no text
is lost, except spaces around calls.  The parts do not depend on how the reply is cut into pieces.
"""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhub.tools.formats import CLOSE, MAX_OBJECTS, OPEN, ParsedReply, as_call, parse_hermes, parse_json
from rlhub.utils.tool_calls import ToolCall

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""Matches the beginning of a call, up to its arguments."""
CALL_ENDS = re.compile(r"\s*\}?\s*")
"""Matches the rest of a call after its arguments."""
MARKS = re.compile(r'[{}"\\]')


@dataclass(slots=True, kw_only=True, frozen=True)
class CallPart:
    """A part of a tool call.  index: the number of the call in the reply.  name: only in the first part.  arguments: the next
    characters."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True, kw_only=True, frozen=True)
class ReasoningPart:
    """A part of what the model writes before its answer, which is no part of the answer's text."""

    text: str


ReplyPart = str | CallPart | ReasoningPart


class CallStream(ABC):
    """Parses one reply.  num_closed: the number of calls that are complete."""

    def __init__(self) -> None:
        self.num_closed = 0

    @abstractmethod
    def add(self, text: str) -> list[ReplyPart]:
        """Appends the next characters; returns the parts that have become final."""

    @abstractmethod
    def end(self) -> list[ReplyPart]:
        """Ends the reply; returns all remaining parts."""

    def whole(self, text: str) -> list[ReplyPart]:
        """Returns the parts of a whole reply; nothing was appended before."""
        return [*self.add(text), *self.end()]

    def closes_with(self, text: str) -> bool:
        """Returns whether `text` would complete a call, without appending it."""
        ahead = copy.deepcopy(self)
        ahead.add(text)
        return ahead.num_closed > 0


class ReplyParser(Protocol):
    """Parses replies in the format of a library, whose parsers are built for one tokenizer.  Its text has all special tokens."""

    def stream(self, tools: Sequence[dict[str, Any]], prompt_ids: Sequence[int]) -> CallStream:
        """Returns the parser of one reply.  tools: those that it may call; none: it is not searched for calls."""
        ...


class PlainText(CallStream):
    """Returns all text unchanged: the reply has no calls."""

    def add(self, text: str) -> list[ReplyPart]:
        return [text] if text else []

    def end(self) -> list[ReplyPart]:
        return []


class Chained(CallStream):
    """Parses the text that one parser leaves with another: the calls of a reply whose reasoning was taken out."""

    def __init__(self, first: CallStream, then: CallStream) -> None:
        super().__init__()
        self._first, self._then = first, then

    def add(self, text: str) -> list[ReplyPart]:
        return self._pass_on(self._first.add(text))

    def end(self) -> list[ReplyPart]:
        return [*self._pass_on(self._first.end()), *self._then.end()]

    def whole(self, text: str) -> list[ReplyPart]:
        return [*self._pass_on(self._first.whole(text)), *self._then.end()]

    def _pass_on(self, parts: list[ReplyPart]) -> list[ReplyPart]:
        read = (self._then.add(part) if isinstance(part, str) else [part] for part in parts)
        return [part for found in read for part in found]


class WholeReply(CallStream):
    """Parses a format that can be parsed only as a whole."""

    def __init__(self, parse: Callable[[str], ParsedReply]) -> None:
        super().__init__()
        self._parse, self._text = parse, ""

    def add(self, text: str) -> list[ReplyPart]:
        self._text += text
        return []

    def end(self) -> list[ReplyPart]:
        reply = self._parse(self._text)
        if not reply.calls:
            return [self._text] if self._text else []
        calls = [CallPart(index=index, name=call.name, arguments=written(call)) for index, call in enumerate(reply.calls)]
        self.num_closed = len(calls)
        return [*([reply.text] if reply.text else []), *calls]


class _StreamReader(CallStream):
    """A parser in one of its states.  A state consumes from `_buffer` the characters that are final, emits their parts, and
    returns whether the new state has to look at the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = ""
        self._parts: list[ReplyPart] = []
        self._spaces = ""  # emitted when text follows: before and after calls they are not the reply's
        self._has_text = False
        self._num_begun = 0
        self._braces = _BraceCounter()
        self._state: Callable[[bool], bool] = self._outside

    def add(self, text: str) -> list[ReplyPart]:
        self._buffer += text
        return self._new_parts(last=False)

    def end(self) -> list[ReplyPart]:
        found = self._new_parts(last=True)
        self.num_closed = self._num_begun
        return found if self._num_begun or not self._spaces else [*found, self._spaces]

    def _new_parts(self, *, last: bool) -> list[ReplyPart]:
        while self._state(last):
            pass
        found, self._parts = self._parts, []
        return found

    @abstractmethod
    def _outside(self, last: bool) -> bool: ...

    @abstractmethod
    def _arguments(self, last: bool) -> bool: ...

    def _emit_text(self, text: str) -> None:
        text = self._spaces + text
        if self._num_begun and not self._has_text:
            text = text.lstrip()
        stripped = text.rstrip()
        self._spaces = text[len(stripped) :]
        if stripped:
            self._has_text = True
            self._parts.append(stripped)

    def _advance(self, count: int, then: Callable[[bool], bool]) -> bool:
        self._buffer, self._state = self._buffer[count:], then
        return True

    def _begin_call(self, text: str) -> bool:
        """Emits the call whose arguments begin in `text`, the beginning of the buffer; returns whether there is one."""
        head = HEAD.match(text)
        name = _decoded(head[1]) if head else None
        if head is None or not isinstance(name, str):
            return False
        self._emit_call(name, "")
        self._braces = _BraceCounter()
        return self._advance(head.end(), self._arguments)

    def _emit_call(self, name: str, arguments: str) -> None:
        self._parts.append(CallPart(index=self._num_begun, name=name, arguments=arguments))
        self._num_begun += 1
        if not self._has_text:
            self._spaces = ""

    def _emit_whole_call(self, value: object) -> bool:
        """Emits a decoded object as a call; returns whether it is one."""
        call = as_call(value)
        if not isinstance(call, ToolCall):
            return False
        self._emit_call(call.name, written(call))
        self.num_closed = self._num_begun
        return True

    def _emit_arguments(self, limit: int) -> bool:
        """Emits at most `limit` characters of arguments; returns whether the arguments are complete."""
        end = self._braces.end(self._buffer[:limit])
        taken = limit if end is None else end
        if taken:
            self._parts.append(CallPart(index=self._num_begun - 1, arguments=self._buffer[:taken]))
        self._buffer = self._buffer[taken:]
        return end is not None

    def _close_call(self, count: int) -> bool:
        self.num_closed = self._num_begun
        return self._advance(count, self._outside)


class HermesStream(_StreamReader):
    """Parses as parse_hermes does, except for invalid calls."""

    def _outside(self, last: bool) -> bool:
        place = beginning(self._buffer, OPEN)
        opened = self._buffer.startswith(OPEN, place)
        self._emit_text(self._buffer[: len(self._buffer) if last and not opened else place])
        if opened:
            return self._advance(place + len(OPEN), self._inside)
        self._buffer = "" if last else self._buffer[place:]
        return False

    def _inside(self, last: bool) -> bool:
        end = self._buffer.find(CLOSE)
        block = self._buffer if end < 0 else self._buffer[:end]
        if self._begin_call(block):
            return True
        if end < 0 and not last:
            return False
        if end < 0:
            self._emit_text(OPEN + self._buffer)
            self._buffer = ""
            return False
        if not self._emit_whole_call(_decoded(block)):
            self._emit_text(OPEN + block + CLOSE)
        return self._advance(end + len(CLOSE), self._outside)

    def _arguments(self, last: bool) -> bool:
        place = beginning(self._buffer, CLOSE)
        closed = self._buffer.startswith(CLOSE, place)
        if self._emit_arguments(len(self._buffer) if last and not closed else place) or (
            closed and self._buffer.startswith(CLOSE)
        ):
            return self._advance(0, self._after)
        return False

    def _after(self, last: bool) -> bool:
        end = self._buffer.find(CLOSE)
        if end >= 0:
            return self._close_call(end + len(CLOSE))
        if last and not CALL_ENDS.fullmatch(self._buffer):
            self._emit_text(self._buffer)
        return False


class JsonStream(_StreamReader):
    """Parses as parse_json does, except for invalid calls."""

    def __init__(self) -> None:
        super().__init__()
        self._num_objects = self._looked_at = 0

    def _outside(self, last: bool) -> bool:
        place = self._buffer.find("{") if self._num_objects < MAX_OBJECTS else -1
        if place < 0:
            self._emit_text(self._buffer)
            self._buffer = ""
            return False
        self._emit_text(self._buffer[:place])
        self._num_objects += 1
        self._braces, self._looked_at = _BraceCounter(), 0
        return self._advance(place, self._object)

    def _object(self, last: bool) -> bool:
        if self._begin_call(self._buffer):
            return True
        key = self._buffer[1:].lstrip()[:1]
        if key and key not in ('"', "}"):
            return self._no_object()
        found = self._braces.end(self._buffer[self._looked_at :])
        end = None if found is None else self._looked_at + found
        self._looked_at = len(self._buffer)
        if end is None:
            return last and self._no_object()
        value = _decoded(self._buffer[:end])
        if value is None:
            return self._no_object()
        # A name alone is no call here: other objects have names too.
        if not {"arguments", "parameters"} & value.keys() or not self._emit_whole_call(value):
            self._emit_text(self._buffer[:end])
        return self._advance(end, self._outside)

    def _no_object(self) -> bool:
        """Emits the brace as text; calls may follow it."""
        self._emit_text("{")
        return self._advance(1, self._outside)

    def _arguments(self, last: bool) -> bool:
        return self._emit_arguments(len(self._buffer)) and self._advance(0, self._after)

    def _after(self, last: bool) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith("}"):
            return self._close_call(len(self._buffer) - len(rest) + 1)
        if not rest.startswith(","):  # the call is not closed as it should be
            return bool(rest) and self._close_call(0)
        end = _BraceCounter(1).end(self._buffer)
        if end is None and last:
            self._emit_text(self._buffer)
        return end is not None and self._close_call(end)


class _BraceCounter:
    """Finds the end of an object by its braces, ignoring those in strings."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False

    def end(self, text: str) -> int | None:
        """Returns how many of the next characters belong to the object, or None if it does not end within them."""
        place = 0
        if self._escaped and text:
            place, self._escaped = 1, False
        while mark := MARKS.search(text, place):
            place = mark.end()
            match mark[0]:
                case '"':
                    self._quoted = not self._quoted
                case "\\" if self._quoted and place == len(text):
                    self._escaped = True
                case "\\" if self._quoted:
                    place += 1
                case "{" if not self._quoted:
                    self._depth += 1
                case "}" if not self._quoted:
                    self._depth -= 1
                    if self._depth == 0:
                        return place
        return None


CALL_STREAMS: dict[Callable[[str], ParsedReply], Callable[[], CallStream]] = {parse_hermes: HermesStream, parse_json: JsonStream}
"""Format -> the parser of replies that are being generated."""
CALLS_BEGIN: dict[Callable[[str], ParsedReply], str] = {parse_hermes: f"{OPEN}\n", parse_json: ""}
"""Format -> the text before a call's object."""


def call_stream(parse: Callable[[str], ParsedReply] | None) -> CallStream:
    """Returns the parser for a reply in this format; None: the reply has no calls."""
    if parse is None:
        return PlainText()
    make = CALL_STREAMS.get(parse)
    return make() if make is not None else WholeReply(parse)


def opening(parse: Callable[[str], ParsedReply] | None, name: str) -> str | None:
    """Returns the text with which a reply in this format begins if it calls the tool `name`, or any tool for ""; None if it is
    not known."""
    before = CALLS_BEGIN.get(parse) if parse is not None else None
    if before is None:
        return None
    return before + (f'{{"name": {json.dumps(name)}, "arguments": ' if name else '{"name": "')


def written(call: ToolCall) -> str:
    """Returns the arguments of a call as JSON."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def beginning(text: str, item: str) -> int:
    """Returns the position at which `item` stands or may begin in `text`, or the length of `text` if there is none."""
    if (place := text.find(item)) >= 0:
        return place
    for length in range(min(len(item) - 1, len(text)), 0, -1):
        if text.endswith(item[:length]):
            return len(text) - length
    return len(text)


def _decoded(text: str) -> Any:
    """Returns the value of a JSON text, or None if it is not valid JSON."""
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):
        return None
