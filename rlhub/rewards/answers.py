"""Finds the final answers of worked solutions, and scores them: the scorers `gsm8k` and `exact`.

A text states an answer as `#### x`, `\boxed{x}`, or "the answer is x".  A model writes the texts, which may be long and odd, so
every search is linear in the text.  Numbers are read exactly, as people and models write them, and nothing is evaluated.

`gsm8k` scores grade-school mathematics (Cobbe et al. 2021, arXiv 2110.14168) by the last number that the response states, or by
the response itself where it is nothing but a number.  A right number anywhere else scores 0; otherwise a policy would learn to
list numbers, and a response cut off in the middle of its working could be right by accident.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

MAX_TRIED = 20  # occurrences of a marker, from the last backwards; those that are no answer (a heading) are skipped
MAX_STATED = 1000  # characters of an answer
LONGEST = 200  # characters of a stated number that are read; the longest numbers below stay within it

_STATED = re.compile(r"answer\b[^\n.:=0-9]{0,40}?(?:\bis\b|:|=)[\s:*]*(?:therefore|thus|exactly|equal to|simply)?", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[.!?;](?=\s|$)|\n")
_HEADING = re.compile(r"\s*[0-9]+\s*(?:[.):]\s+\S|[):]\S)")

# 1,234.50 and .5, but not the 1 of 1,23 or of 1e5, which are other numbers; 40 digits are more than any answer has
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,12}|[0-9]{1,40})(?:\.[0-9]{1,40})?|\.[0-9]{1,40}"
_NUMBER = re.compile(
    rf"\s*(?P<sign>[-+]?)\s*[$£€]?\s*(?P<inner_sign>[-+]?)(?P<top>{_DIGITS})(?![0-9]|[.,][0-9]|[eE][-+]?[0-9])"
    rf"(?:\s*/\s*(?P<bottom>{_DIGITS})(?![0-9]|[.,][0-9]))?\s*[%$]?"
)
_GOES_ON = re.compile(r"\s*(?:[+*×÷^/=]|[-–]\s*[$0-9]|x\s*[0-9]|\\(?:times|cdot|div)|(?:or|to|and|,)\s*[$£€]?[0-9])")
_EQUATION = re.compile(r"\s*(?:[A-Za-z]\w{0,9}\s*=)?(?:(?:[0-9\s.,+*/×÷()x^$£€%-]|\\times|\\cdot|\\div)*=)?")
_UNIT = re.compile(r"[A-Za-z°\s/.]*(?:\^[23])?[\s.]*")

_REPLACED = (
    (re.compile(r"[\u2212\u2013\ufe63\uff0d]"), "-"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[dt]?frac\s*\{\s*([0-9.,]+)\s*\}\s*\{\s*([0-9.,]+)\s*\}"), r"\1/\2"),
    (re.compile(r"\{,\}|\\,(?=[0-9]{3})|,\\!"), ","),
    (re.compile(r"\\[!,;: ()\[\]]|\\(?:left|right|displaystyle|quad)(?![a-zA-Z])|\*\*|__|`|~"), " "),
    (re.compile(r"\\([$%#&])"), r"\1"),
    (re.compile(r"\^\{([23])\}"), r"^\1"),
)


def after_hashes(text: str) -> Iterator[tuple[int, str]]:
    """Yields (position, rest of the line) of `####` marks from the last backwards, without headings like "#### 2. Compute"."""
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
    """Returns (position, content) of the last `\\boxed{...}` or `\\fbox{...}`; content is "" where its braces do not close."""
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
    """Yields (position, clause) of "the answer is ..." and "Answer: ..." from the last backwards."""
    for match in reversed(deque(_STATED.finditer(text), maxlen=MAX_TRIED)):
        rest = text[match.end() : match.end() + MAX_STATED]
        end = _CLAUSE_END.search(rest)
        yield match.start(), rest[: end.start()] if end else rest


def clean(text: str) -> str:
    """Returns the text without LaTeX spacing, `\\text{}`, bold marks and the like, fractions as a/b and minus signs as "-"."""
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text.strip()


def leading_number(text: str) -> Fraction | None:
    """Returns the number with which cleaned text begins, or with which its leading equation ends.

    Returns None if there is none, or if the expression goes on after it ("48 + 24", "3 or 4").
    """
    found = _leading(text)
    return None if found is None else found[0]


def whole_number(text: str, *, units: bool) -> Fraction | None:
    """Returns the number that the cleaned text is, apart from "x =" before it and, with `units`, words after it."""
    found = _leading(text)
    if found is None:
        return None
    value, rest = found
    return value if (_UNIT.fullmatch(rest) if units else not rest.strip(" .")) else None


def _leading(text: str) -> tuple[Fraction, str] | None:
    text = text[:LONGEST]
    equation = _EQUATION.match(text)
    match = _NUMBER.match(text, equation.end() if equation else 0)
    if match is None or _GOES_ON.match(text, match.end()):
        return None
    top = Fraction(match["top"].replace(",", ""))
    bottom = Fraction((match["bottom"] or "1").replace(",", ""))
    if bottom == 0:
        return None
    negative = (match["sign"] == "-") != (match["inner_sign"] == "-")
    return (-top if negative else top) / bottom, text[match.end() :]


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Returns 1.0 if the response and the ground truth are the same sequence of words, else 0.0; the scorer `exact`."""
    return float(solution_str.split() == str(ground_truth).split())


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Returns 1.0 for the right number, 0.0 for another or none; the scorer `gsm8k`.

    Raises ValueError if the ground truth is no number.
    """
    text = str(ground_truth)
    expected = whole_number(clean(text.rsplit("####", 1)[-1]), units=False)
    if expected is None:
        raise ValueError(f"ground_truth {text[:80]!r} is not a number")
    return float(final_number(solution_str) == expected)


def final_number(text: str) -> Fraction | None:
    """Returns the number of the last answer that the text states, or None."""
    candidates = sorted(_candidates(text), key=lambda candidate: candidate[0])
    if candidates:
        return candidates[-1][1]
    bare = len(text) <= LONGEST and "=" not in text  # an equation may be any step of a working
    return whole_number(clean(text), units=True) if bare else None


def _candidates(text: str) -> Iterator[tuple[int, Fraction | None]]:
    """Yields (position, number) of the last valid statement of each form; a box counts as a statement whatever is in it."""
    for statements in (after_hashes(text), stated(text)):
        numbers = ((position, leading_number(clean(answer))) for position, answer in statements)
        yield from ((position, number) for position, number in _first_valid(numbers))
    in_box = boxed(text)
    if in_box is not None:
        yield in_box[0], whole_number(clean(in_box[1]), units=True)


def _first_valid(numbers: Iterator[tuple[int, Fraction | None]]) -> Iterator[tuple[int, Fraction | None]]:
    for position, number in numbers:
        if number is not None:
            yield position, number
            return
