"""Where a worked solution states its final answer: `#### x`, `\\boxed{x}`, "the answer is x".

Every search is linear in the text: it is written by a model, and may be long and odd.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

MAX_TRIED = 20  # occurrences of a marker, from the last backwards; what is not an answer (a heading) is passed over
MAX_STATED = 1000  # characters of an answer

_STATED = re.compile(r"answer\b[^\n.:=0-9]{0,40}?(?:\bis\b|:|=)[\s:*]*(?:therefore|thus|exactly|equal to|simply)?", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[.!?;](?=\s|$)|\n")
_HEADING = re.compile(r"\s*[0-9]+\s*(?:[.):]\s+\S|[):]\S)")


def after_hashes(text: str) -> Iterator[tuple[int, str]]:
    """(position, rest of the line) of the `####` marks from the last backwards, without headings like "#### 2. Compute"."""
    end = len(text)
    for _ in range(MAX_TRIED):
        position = text.rfind("####", 0, end)
        if position < 0:
            return
        line = text[position + 4 : position + 4 + MAX_STATED].split("\n", 1)[0]
        if not _HEADING.match(line):
            yield position, line
        end = position


def boxed(text: str) -> tuple[int, str] | None:
    """(position, content) of the last `\\boxed{...}` or `\\fbox{...}`; content is "" where its braces do not close."""
    position = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if position < 0:
        return None
    opening = text.find("{", position, position + 10)
    if opening < 0:
        return position, ""
    depth = 0
    for index in range(opening, min(len(text), opening + MAX_STATED)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return position, text[opening + 1 : index]
    return position, ""


def stated(text: str) -> Iterator[tuple[int, str]]:
    """(position, clause) of "the answer is ...", "Answer: ..." from the last backwards."""
    for match in reversed(deque(_STATED.finditer(text), maxlen=MAX_TRIED)):
        rest = text[match.end() : match.end() + MAX_STATED]
        end = _CLAUSE_END.search(rest)
        yield match.start(), rest[: end.start()] if end else rest
