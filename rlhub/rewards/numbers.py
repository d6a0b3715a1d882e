"""Numbers as people and models write them, read exactly and without evaluating anything."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 200  # characters of a stated answer that are looked at; the longest numbers below stay within it

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


def clean(text: str) -> str:
    """The text less LaTeX spacing, `\\text{}`, bold marks and the like; simple fractions as a/b, minus signs as "-"."""
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text.strip()


def leading_number(text: str) -> Fraction | None:
    """The number that cleaned text begins with, or that its leading equation ends with; None if there is none, or if the
    expression goes on after it ("48 + 24", "3 or 4")."""
    found = _leading(text)
    return None if found is None else found[0]


def whole_number(text: str, *, units: bool) -> Fraction | None:
    """The number that the cleaned text is, "x =" before and, with `units`, words after it aside."""
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
