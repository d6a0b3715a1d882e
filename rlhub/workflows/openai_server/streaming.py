"""Answers under way: what of their text and tokens may be told before their end is known.

What a client has read cannot be taken back, so text waits while more tokens could still change it: for the token after it (a
character may be spread over several, and tokenizers join neighbours), while it may be the beginning of a stop text, and from
where a tool call may begin.  What is told is a beginning of what the whole answer says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import commonprefix

from rlhub.engines.rollout.base import Completion, Progress

INCOMPLETE = "\ufffd"
"""What bytes that are no whole character decode to."""
WINDOW_TOKENS = 32
"""Tokens decoded anew with each token are at least so many, and at most twice as many: no tokenizer joins tokens so far apart."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Rules:
    """How a request's answers are read; see `as_answer`.

    call_marker: text with which every tool call begins, "" where that is not known; None: no calls are looked for.
    """

    decode: Callable[[Sequence[int]], str]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    call_marker: str | None = None


class StableText:
    """Tokens as text.  stable: what further tokens cannot change; unsure: what follows it for now."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.stable = self.unsure = ""
        self._decode = decode
        self._window: list[int] = []
        self._text = ""  # of the window
        self._taken = 0  # characters of the window's text that are in `stable`

    def add(self, token: int) -> None:
        """One token more."""
        self._window.append(token)
        before, self._text = self._text, self._decode(self._window)
        sure = commonprefix([before, self._text]).rstrip(INCOMPLETE)
        self.stable += sure[self._taken :]
        self._taken = max(self._taken, len(sure))
        self.unsure = self._text[self._taken :]
        if len(self._window) >= 2 * WINDOW_TOKENS:
            self._shorten()

    def _shorten(self) -> None:
        """Forget the older tokens, where the younger ones alone read the same."""
        young = self._window[WINDOW_TOKENS:]
        text = self._decode(young)
        if text.endswith(self.unsure):
            self._window, self._text, self._taken = young, text, len(text) - len(self.unsure)


@dataclass(slots=True, kw_only=True)
class Part:
    """A piece of an answer.  start: number of its first token."""

    text: str
    start: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]


@dataclass(eq=False)
class Choice:
    """One answer under way.  Of who writes it down: begun, whether its client was told of it; offset, the tokens' characters."""

    prompt_ids: list[int]
    rules: Rules
    changed: Callable[[], None]
    begun: bool = False
    offset: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    written: Completion = field(default_factory=lambda: Completion(token_ids=[], log_probs=[], finish_reason="stop"))

    def __post_init__(self) -> None:
        self._text = StableText(self.rules.decode)
        self._told_tokens = self._told_text = 0

    def follow(self, progress: Progress) -> None:
        """More tokens.  Those after the one that completes a stop text are not the answer's: then `stopped` is set, and
        `written` is the whole answer."""
        for token, log_prob, version in zip(progress.token_ids, progress.log_probs, progress.versions, strict=True):
            if self.stopped.is_set():
                break
            self.written.token_ids.append(token)
            self.written.log_probs.append(log_prob)
            self.written.versions.append(version)
            self._read(token)
        self.changed()

    def _read(self, token: int) -> None:
        known = len(self._text.stable)
        self._text.add(token)
        if not self.rules.stop or token in self.rules.stop_token_ids:  # the latter's text is not the answer's
            return
        recent = self._text.stable[max(0, known - max(map(len, self.rules.stop))) :] + self._text.unsure
        if any(item in recent for item in self.rules.stop):
            self.stopped.set()

    def take(self) -> Part:
        """What may be told and was not yet."""
        return self._part(self._text.stable[: self._sayable()], self.written)

    def rest(self, text: str, completion: Completion) -> Part:
        """The answer is complete: all that was not told yet."""
        return self._part(text, completion)

    def _sayable(self) -> int:
        text, first = self._text.stable, self._told_text
        end = first + min((_beginning(text[first:], item) for item in self.rules.stop), default=len(text) - first)
        if self.rules.call_marker is None:
            return end
        end = min(end, first + _beginning(text[first:], self.rules.call_marker))
        return len(text[:end].rstrip())  # an answer with calls ends before the spaces in front of them

    def _part(self, text: str, completion: Completion) -> Part:
        start, offset = self._told_tokens, self._told_text
        self._told_tokens, self._told_text = len(completion.token_ids), max(offset, len(text))
        return Part(
            text=text[offset:],
            start=start,
            token_ids=completion.token_ids[start:],
            log_probs=completion.log_probs[start:],
            versions=completion.versions[start:],
        )


class UnderWay:
    """The answers of one request, in the order of their choices, and news of them."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self._news = asyncio.Event()

    def begin(self, prompt_ids: list[int], rules: Rules, count: int) -> list[Choice]:
        """So many answers to one prompt."""
        made = [Choice(prompt_ids, rules, self.notify) for _ in range(count)]
        self.choices += made
        return made

    def notify(self) -> None:
        self._news.set()

    async def news(self, timeout_s: float) -> None:
        """Waits until something may be to tell, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()


def _beginning(text: str, item: str) -> int:
    """Where `item` stands or may be beginning in `text`; its length if nowhere."""
    if (place := text.find(item)) >= 0:
        return place
    for length in range(min(len(item) - 1, len(text)), 0, -1):
        if text.endswith(item[:length]):
            return len(text) - length
    return len(text)
