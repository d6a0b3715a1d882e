"""Replies read while they are being written: what is text, and what is a tool call, as soon as it is sure.

What was told is not taken back, so a call is told once its name is known and its arguments have begun as an object; from there
on they are told as the model writes them, also where they turn out to be broken or are cut off, as OpenAI's own are.  A call
that is written in any other order is told when it is complete.  What only looks like a call is text, and no text is lost, but
for spaces around calls.  How the reply is cut into pieces changes nothing of what is told.
"""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhub.tools.formats import CLOSE, MAX_OBJECTS, OPEN, ParsedReply, as_call, parse_hermes, parse_json
from rlhub.utils.tool_calls import ToolCall

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""A call whose arguments begin."""
CALL_ENDS = re.compile(r"\s*\}?\s*")
"""All that may be left of a call after its arguments."""
MARKS = re.compile(r'[{}"\\]')


@dataclass(slots=True, kw_only=True, frozen=True)
class CallPart:
    """More of a tool call.  index: which of the reply's.  name: with its first part only.  arguments: the next characters."""

    index: int
    name: str | None = None
    arguments: str = ""


Part = str | CallPart


class CallStream(ABC):
    """One reply.  num_closed: calls to which nothing can be added any more."""

    def __init__(self) -> None:
        self.num_closed = 0

    @abstractmethod
    def add(self, text: str) -> list[Part]:
        """The next characters; what is sure now and was not told yet."""

    @abstractmethod
    def end(self) -> list[Part]:
        """There are no more; all that was not told yet."""

    def closes_with(self, text: str) -> bool:
        """Whether a call is complete once `text` has come, too; it has not."""
        ahead = copy.deepcopy(self)
        ahead.add(text)
        return ahead.num_closed > 0


class PlainText(CallStream):
    """No calls are looked for."""

    def add(self, text: str) -> list[Part]:
        return [text] if text else []

    def end(self) -> list[Part]:
        return []


class WholeReply(CallStream):
    """Of a format that can be read as a whole only."""

    def __init__(self, parse: Callable[[str], ParsedReply]) -> None:
        super().__init__()
        self._parse, self._text = parse, ""

    def add(self, text: str) -> list[Part]:
        self._text += text
        return []

    def end(self) -> list[Part]:
        reply = self._parse(self._text)
        if not reply.calls:
            return [self._text] if self._text else []
        calls = [CallPart(index=index, name=call.name, arguments=written(call)) for index, call in enumerate(reply.calls)]
        self.num_closed = len(calls)
        return [*([reply.text] if reply.text else []), *calls]


class _Reading(CallStream):
    """What the formats here have in common: a reader in one of its states, each of which takes from `_held` what it is sure of
    and says whether another, or itself again, has to look at the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._told: list[Part] = []
        self._spaces = ""  # told when text follows: before and after calls they are not the reply's
        self._said = False
        self._num_begun = 0
        self._braces = _Braces()
        self._read: Callable[[bool], bool] = self._outside

    def add(self, text: str) -> list[Part]:
        self._held += text
        return self._take(last=False)

    def end(self) -> list[Part]:
        found = self._take(last=True)
        self.num_closed = self._num_begun
        return found if self._num_begun or not self._spaces else [*found, self._spaces]

    def _take(self, *, last: bool) -> list[Part]:
        while self._read(last):
            pass
        found, self._told = self._told, []
        return found

    @abstractmethod
    def _outside(self, last: bool) -> bool: ...

    @abstractmethod
    def _arguments(self, last: bool) -> bool: ...

    def _say(self, text: str) -> None:
        text = self._spaces + text
        if self._num_begun and not self._said:
            text = text.lstrip()
        told = text.rstrip()
        self._spaces = text[len(told) :]
        if told:
            self._said = True
            self._told.append(told)

    def _skip(self, count: int, then: Callable[[bool], bool]) -> bool:
        self._held, self._read = self._held[count:], then
        return True

    def _begins(self, text: str) -> bool:
        """Whether a call's arguments begin in `text`, with which what is held begins; then it is told."""
        head = HEAD.match(text)
        name = _decoded(head[1]) if head else None
        if head is None or not isinstance(name, str):
            return False
        self._call(name, "")
        self._braces = _Braces()
        return self._skip(head.end(), self._arguments)

    def _call(self, name: str, arguments: str) -> None:
        self._told.append(CallPart(index=self._num_begun, name=name, arguments=arguments))
        self._num_begun += 1
        if not self._said:
            self._spaces = ""

    def _whole(self, value: object) -> bool:
        """Whether this is a call; then it is told."""
        call = as_call(value)
        if not isinstance(call, ToolCall):
            return False
        self._call(call.name, written(call))
        self.num_closed = self._num_begun
        return True

    def _argue(self, limit: int) -> bool:
        """Tell of arguments, at most so many characters; whether they are complete."""
        end = self._braces.end(self._held[:limit])
        taken = limit if end is None else end
        if taken:
            self._told.append(CallPart(index=self._num_begun - 1, arguments=self._held[:taken]))
        self._held = self._held[taken:]
        return end is not None

    def _close(self, count: int) -> bool:
        self.num_closed = self._num_begun
        return self._skip(count, self._outside)


class HermesStream(_Reading):
    """As parse_hermes, but for broken calls."""

    def _outside(self, last: bool) -> bool:
        place = beginning(self._held, OPEN)
        opened = self._held.startswith(OPEN, place)
        self._say(self._held[: len(self._held) if last and not opened else place])
        if opened:
            return self._skip(place + len(OPEN), self._inside)
        self._held = "" if last else self._held[place:]
        return False

    def _inside(self, last: bool) -> bool:
        end = self._held.find(CLOSE)
        block = self._held if end < 0 else self._held[:end]
        if self._begins(block):
            return True
        if end < 0 and not last:
            return False
        if end < 0:
            self._say(OPEN + self._held)
            self._held = ""
            return False
        if not self._whole(_decoded(block)):
            self._say(OPEN + block + CLOSE)
        return self._skip(end + len(CLOSE), self._outside)

    def _arguments(self, last: bool) -> bool:
        place = beginning(self._held, CLOSE)
        closed = self._held.startswith(CLOSE, place)
        if self._argue(len(self._held) if last and not closed else place) or (closed and self._held.startswith(CLOSE)):
            return self._skip(0, self._after)
        return False

    def _after(self, last: bool) -> bool:
        end = self._held.find(CLOSE)
        if end >= 0:
            return self._close(end + len(CLOSE))
        if last and not CALL_ENDS.fullmatch(self._held):
            self._say(self._held)
        return False


class JsonStream(_Reading):
    """As parse_json, but for broken calls."""

    def __init__(self) -> None:
        super().__init__()
        self._num_objects = self._looked_at = 0

    def _outside(self, last: bool) -> bool:
        place = self._held.find("{") if self._num_objects < MAX_OBJECTS else -1
        if place < 0:
            self._say(self._held)
            self._held = ""
            return False
        self._say(self._held[:place])
        self._num_objects += 1
        self._braces, self._looked_at = _Braces(), 0
        return self._skip(place, self._object)

    def _object(self, last: bool) -> bool:
        if self._begins(self._held):
            return True
        key = self._held[1:].lstrip()[:1]
        if key and key not in ('"', "}"):
            return self._no_object()
        found = self._braces.end(self._held[self._looked_at :])
        end = None if found is None else self._looked_at + found
        self._looked_at = len(self._held)
        if end is None:
            return last and self._no_object()
        value = _decoded(self._held[:end])
        if value is None:
            return self._no_object()
        # A name alone is no call here: other objects have names too.
        if not {"arguments", "parameters"} & value.keys() or not self._whole(value):
            self._say(self._held[:end])
        return self._skip(end, self._outside)

    def _no_object(self) -> bool:
        """The brace is text, and calls may stand after it."""
        self._say("{")
        return self._skip(1, self._outside)

    def _arguments(self, last: bool) -> bool:
        return self._argue(len(self._held)) and self._skip(0, self._after)

    def _after(self, last: bool) -> bool:
        rest = self._held.lstrip()
        if rest.startswith("}"):
            return self._close(len(self._held) - len(rest) + 1)
        if not rest.startswith(","):  # the call is not closed as it should be
            return bool(rest) and self._close(0)
        end = _Braces(1).end(self._held)
        if end is None and last:
            self._say(self._held)
        return end is not None and self._close(end)


class _Braces:
    """Where an object ends, by its braces: those in texts do not count."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False

    def end(self, text: str) -> int | None:
        """How many of the next characters there are up to the object's end, where it ends in them."""
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
"""Format -> how its replies are read while they are being written."""
CALLS_BEGIN: dict[Callable[[str], ParsedReply], str] = {parse_hermes: f"{OPEN}\n", parse_json: ""}
"""Format -> what stands before a call's object."""


def call_stream(parse: Callable[[str], ParsedReply] | None) -> CallStream:
    """For a reply in this format; None: it has no calls."""
    if parse is None:
        return PlainText()
    make = CALL_STREAMS.get(parse)
    return make() if make is not None else WholeReply(parse)


def opening(parse: Callable[[str], ParsedReply] | None, name: str) -> str | None:
    """What a reply in this format that calls the tool `name`, or with "" any, may begin with; None where that is not known."""
    before = CALLS_BEGIN.get(parse) if parse is not None else None
    if before is None:
        return None
    return before + (f'{{"name": {json.dumps(name)}, "arguments": ' if name else '{"name": "')


def written(call: ToolCall) -> str:
    """A call's arguments as JSON."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def beginning(text: str, item: str) -> int:
    """Where `item` stands or may be beginning in `text`; its length if nowhere."""
    if (place := text.find(item)) >= 0:
        return place
    for length in range(min(len(item) - 1, len(text)), 0, -1):
        if text.endswith(item[:length]):
            return len(text) - length
    return len(text)


def _decoded(text: str) -> Any:
    """None where it is no JSON."""
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):
        return None
