"""Fills the prompt of a judge, and reads the number in its answer.  No text is evaluated.

The template is filled in one pass over its own places, so that braces in a response stay text.  This file loads no torch, since
the checks before the start read templates too.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path

from rlhub.errors import ConfigError

PLACES = ("question", "response", "ground_truth")
KEY = "reward_model.judge"
BUILT_IN = (
    "Rate the answer to the question from 0 (wrong or useless) to 10 (right and clear).\n\n"
    "Question:\n{question}\n\nReference answer:\n{ground_truth}\n\nAnswer to rate:\n{response}\n\n"
    "End with one line: Score: <number>"
)


@dataclass(slots=True, kw_only=True, frozen=True)
class JudgePrompt:
    """A parsed template.  pieces: (literal text, name of the place that follows it or None), in order."""

    pieces: tuple[tuple[str, str | None], ...]

    def fill(self, **texts: str) -> str:
        """Returns the template with `texts`, one for each place, inserted unchanged."""
        return "".join(literal + (texts[place] if place is not None else "") for literal, place in self.pieces)


def read_prompt(template: str | None) -> JudgePrompt:
    """Returns the prompt of a setting: None is the built-in template, and text without a brace is the path of a file.

    Raises ConfigError for a template that cannot be read.
    """
    text = BUILT_IN if template is None else template
    if "{" not in text:
        text = _file(text)
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"{KEY}.prompt_template: {error}; a literal brace is written twice") from error
    for _, place, form, conversion in parsed:
        if place is not None and (place not in PLACES or form or conversion):
            shown = place + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ConfigError(
                f"{KEY}.prompt_template: {{{shown}}} is no place; known: {', '.join(f'{{{name}}}' for name in PLACES)} "
                "(a literal brace is written twice)"
            )
    if not any(place == "response" for _, place, _, _ in parsed):
        raise ConfigError(f"{KEY}.prompt_template has no {{response}}: the judge would not see what it judges")
    return JudgePrompt(pieces=tuple((literal, place) for literal, place, _, _ in parsed))


def _file(name: str) -> str:
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{KEY}.prompt_template={name!r} has no place like {{response}}, so it names a file, which cannot be read: {error}"
        ) from error
    return text


def read_pattern(pattern: str) -> re.Pattern[str]:
    """Returns the compiled score_pattern.  Raises ConfigError unless it is a regular expression with exactly one group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{KEY}.score_pattern={pattern!r} is no regular expression: {error}") from error
    if compiled.groups != 1:
        raise ConfigError(f"{KEY}.score_pattern={pattern!r} has {compiled.groups} groups; expected 1, around the number")
    return compiled


_NUMBER = re.compile(r"\s*[-+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*")


def read_score(judgement: str, pattern: re.Pattern[str], low: float, high: float) -> float | None:
    """Returns the number at the last match of `pattern`; None without a match, or if the number is not in [low, high]."""
    found = None
    for match in pattern.finditer(judgement):
        found = match[1]
    if found is None or not _NUMBER.fullmatch(found):
        return None
    value = float(found)
    return value if low <= value <= high else None
