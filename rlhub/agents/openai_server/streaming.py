"""Running answers: which of their text and tokens may be sent before the rest is known.

A client cannot take back what it has read.  Text therefore waits while further tokens could still change it: the next token may
complete a character or join its neighbour, and the text may be the beginning of a stop text or of a tool call.  The streamed
parts always form a beginning of the whole answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import commonprefix

from rlhub.engines.rollout.base import Completion, SampledTokens
from rlhub.tools.call_streams import CallStream, PlainText, ReplyPart, beginning
from rlhub.tools.formats import ParsedReply

INCOMPLETE = "\ufffd"
"""The character to which bytes decode that form no whole character."""
WINDOW_TOKENS = 32
"""Each token is decoded together with at least so many tokens before it and at most twice as many; no tokenizer joins tokens over
a longer distance."""
ID_BYTES = 12

FindCalls = Callable[[str], ParsedReply]
"""Finds the tool calls in an answer's text; `rlhub.tools.registry.TOOL_FORMATS` has some."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Rules:
    """The rules by which the answers to a request are read; see `as_answer`.

    make_stream: returns a parser of an answer's text.  opening: the text with which the prompt has begun the answer.
    one_call: the answer ends with its first call.
    """

    decode: Callable[[Sequence[int]], str]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    make_stream: Callable[[], CallStream] = PlainText
    opening: str = ""
    one_call: bool = False

    def stream(self) -> CallStream:
        """Returns a parser of one answer's text, which continues after the opening."""
        made = self.make_stream()
        told = made.add(self.opening)
        assert not told, "an opening alone says nothing for sure"
        return made

    def complete(self, text: str) -> bool:
        """Returns whether the answer has ended within this text or ends with it."""
        return any(item in text for item in self.stop) or (self.one_call and self.stream().closes_with(text))

    @property
    def may_end(self) -> bool:
        """Returns whether an answer can be complete before the engine ends it."""
        return bool(self.stop) or self.one_call


class StableText:
    """Decodes a growing list of tokens.  stable: the text that further tokens cannot change.  unsure: the current text after
    it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.stable = self.unsure = ""
        self._decode = decode
        self._window: list[int] = []
        self._text = ""  # of the window
        self._taken = 0  # characters of the window's text that are in `stable`

    def add(self, token: int) -> None:
        """Appends one token."""
        self._window.append(token)
        before, self._text = self._text, self._decode(self._window)
        sure = commonprefix([before, self._text]).rstrip(INCOMPLETE)
        self.stable += sure[self._taken :]
        self._taken = max(self._taken, len(sure))
        self.unsure = self._text[self._taken :]
        if len(self._window) >= 2 * WINDOW_TOKENS:
            self._shorten()

    def _shorten(self) -> None:
        """Drops the older tokens of the window, where the younger ones alone decode to the same end."""
        young = self._window[WINDOW_TOKENS:]
        text = self._decode(young)
        if text.endswith(self.unsure):
            self._window, self._text, self._taken = young, text, len(text) - len(self.unsure)


@dataclass(slots=True, kw_only=True)
class StreamPart:
    """A part of an answer: text and tool calls in their order.  start: the index of its first token.  tokens: from there on."""

    written: list[ReplyPart]
    start: int
    tokens: Completion


@dataclass(eq=False)
class Choice:
    """One running answer.

    changed: called after new tokens.  The Writer keeps two values here: begun, whether the first chunk was sent; offset, the
    number of characters of the tokens sent.
    """

    prompt_ids: list[int]
    rules: Rules
    changed: Callable[[], None]
    begun: bool = False
    offset: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    written: Completion = field(default_factory=lambda: Completion(token_ids=[], log_probs=[], finish_reason="stop"))

    def __post_init__(self) -> None:
        self._text = StableText(self.rules.decode)
        self._stream = self.rules.stream()
        self._first_call = self.rules.stream() if self.rules.one_call else PlainText()  # of all that is stable
        self._said: list[ReplyPart] = []
        self._last: StreamPart | None = None
        self._sent_tokens = self._sent_text = 0
        self._call_ids: list[str] = []
        self._copies: list[Choice] = []
        self._whole: tuple[str, Completion] | None = None

    def copy(self, changed: Callable[[], None]) -> Choice:
        """Returns the same answer for another reader, who reads it from its beginning."""
        made = Choice(self.prompt_ids, self.rules, changed)
        made._call_ids = self._call_ids
        self._copies.append(made)
        if self._whole is None:
            made.follow(self.written)
        else:
            made.end(*self._whole)
        return made

    def follow(self, progress: SampledTokens) -> None:
        """Appends tokens.  After the token that completes the answer all further ones are ignored: `stopped` is set, and
        `written` is the whole answer."""
        for index, token in enumerate(progress.token_ids):
            if self.stopped.is_set():
                break
            self.written.extend(progress.between(index, index + 1))
            self._read(token)
        self.changed()
        for copy in self._copies:
            copy.follow(progress)

    def _read(self, token: int) -> None:
        known = len(self._text.stable)
        self._text.add(token)
        if token in self.rules.stop_token_ids:  # whose text is not the answer's
            return
        if self.rules.one_call:
            self._first_call.add(self._text.stable[known:])
            if self._first_call.closes_with(self._text.unsure):
                self.stopped.set()
        if not self.rules.stop:
            return
        recent = self._text.stable[max(0, known - max(map(len, self.rules.stop))) :] + self._text.unsure
        if any(item in recent for item in self.rules.stop):
            self.stopped.set()

    def take(self) -> StreamPart:
        """Returns the part that may be sent now and was not sent yet."""
        text = self._text.stable[: self._sayable()]
        return self._part(self._stream.add(text[self._sent_text :]), text, self.written)

    def end(self, text: str, completion: Completion) -> list[ReplyPart]:
        """Ends the answer; returns all its parts, those that were sent included.  text: the whole answer."""
        self._whole, self.written = (text, completion), completion
        for copy in self._copies:
            copy.end(text, completion)
        new = text[self._sent_text :]
        parts = [*self._stream.add(new), *self._stream.end()] if self._sent_text else self._stream.whole(new)
        self._last = self._part(parts, text, completion)
        return self._said

    def rest(self) -> StreamPart:
        """Returns all that was not sent yet, after `end`."""
        assert self._last is not None, "end comes first"
        return self._last

    def call_id(self, index: int) -> str:
        """Returns the id of the answer's call number `index`."""
        while len(self._call_ids) <= index:
            self._call_ids.append(f"call_{secrets.token_hex(ID_BYTES)}")
        return self._call_ids[index]

    def _sayable(self) -> int:
        text, first = self._text.stable, self._sent_text
        return first + min((beginning(text[first:], item) for item in self.rules.stop), default=len(text) - first)

    def _part(self, parts: list[ReplyPart], text: str, completion: Completion) -> StreamPart:
        start = self._sent_tokens
        self._sent_tokens, self._sent_text = len(completion.token_ids), max(self._sent_text, len(text))
        self._said += parts
        return StreamPart(written=parts, start=start, tokens=completion.between(start))


class RunningAnswer:
    """The choices of one request in their order, and a notification when they change."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self._views: list[RunningAnswer] = []
        self._news = asyncio.Event()

    def begin(self, prompt_ids: list[int], rules: Rules, count: int) -> list[Choice]:
        """Adds `count` answers to one prompt, and returns them."""
        made = [Choice(prompt_ids, rules, self.notify) for _ in range(count)]
        self.choices += made
        for view in self._views:
            view.choices += [choice.copy(view.notify) for choice in made]
        return made

    def view(self) -> RunningAnswer:
        """Returns the same answers for another reader, who reads them from their beginning."""
        made = RunningAnswer()
        made.choices = [choice.copy(made.notify) for choice in self.choices]
        self._views.append(made)
        return made

    def notify(self) -> None:
        """Wakes the coroutine that waits in `news`."""
        self._news.set()

    async def news(self, timeout_s: float) -> None:
        """Waits until an answer has changed, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()
