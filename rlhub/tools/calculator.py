"""calculator: exact arithmetic on expressions that a model writes, with a parser of its own.

Nothing is evaluated as Python.  Numbers are fractions, so 0.1 + 0.2 is 0.3.  Their size is checked before each operation, so that
9**9**9 is an error after microseconds and does not fill the memory.

    sum     := product (("+" | "-") product)*
    product := sign (("*" | "/" | "//" | "%") sign)*
    sign    := ("+" | "-") sign | power
    power   := atom (("**" | "^") sign)?
    atom    := number | "(" sum ")"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rlhub.tools.base import Tool, ToolError
from rlhub.tools.schemas import schema_of
from rlhub.utils.tool_calls import ToolResult, ToolSchema

MAX_CHARACTERS = 500
MAX_DEPTH = 50  # of brackets, signs and powers within one another
MAX_BITS = 2048  # of numerator and denominator: about 600 digits
MAX_DIGITS = 17  # shown after the point of a fraction that has no end
_TOKEN = re.compile(r"\s*(\*\*|//|[-+*/%^()]|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?)")
_WRITTEN = str.maketrans({"×": "*", "÷": "/", "\u2212": "-", "·": "*"})


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    expression: numbers with + - * / // % ** and brackets, for example (17 + 4) * 3.
    """
    return written(calculate(expression))


class CalculatorTool(Tool):
    """Runs `calculator` on the event loop, since the limits on its input keep a call within microseconds."""

    _schema = schema_of(calculator)

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def execute(self, instance: str, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(text=calculator(**arguments))


def calculate(expression: str) -> Fraction:
    """Returns the exact value of an expression.  Raises ToolError if it is not arithmetic or too large."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are read")
    return _Parser(tokens(expression.translate(_WRITTEN))).value()


def tokens(expression: str) -> list[str]:
    """Splits an expression into numbers, operators and brackets."""
    found, position = [], 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ToolError(f"{text[position:].strip()[:20]!r} is no arithmetic; use numbers, + - * / // % ** and brackets")
        found.append(match[1])
        position = match.end()
    if not found:
        raise ToolError("the expression is empty")
    return found


def written(value: Fraction) -> str:
    """Returns a number as a whole number or decimal; a decimal without end is cut after MAX_DIGITS digits."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = abs(value) * 10**MAX_DIGITS
    digits = str(round(scaled)).rjust(MAX_DIGITS + 1, "0")
    text = f"{digits[:-MAX_DIGITS]}.{digits[-MAX_DIGITS:]}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 and text != "0" else text


class _Parser:
    """Evaluates the tokens by recursive descent and bounds every intermediate value."""

    def __init__(self, found: list[str]) -> None:
        self._tokens = [*found, ""]  # the empty token ends the expression
        self._position = 0
        self._depth = 0

    def value(self) -> Fraction:
        result = self._sum()
        if self._next:
            raise ToolError(f"an operator is missing before {self._next!r}")
        return result

    @property
    def _next(self) -> str:
        return self._tokens[self._position]

    def _take(self) -> str:
        self._position += 1
        return self._tokens[self._position - 1]

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next in ("+", "-"):
            value = _bounded(value + self._product() if self._take() == "+" else value - self._product())
        return value

    def _product(self) -> Fraction:
        value = self._sign()
        while self._next in ("*", "/", "//", "%"):
            value = _bounded(_multiplied(self._take(), value, self._sign()))
        return value

    def _sign(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ToolError(f"more than {MAX_DEPTH} brackets or signs within one another")
        value = self._signed() if self._next in ("+", "-") else self._power()
        self._depth -= 1
        return value

    def _signed(self) -> Fraction:
        return -self._sign() if self._take() == "-" else self._sign()

    def _power(self) -> Fraction:
        base = self._atom()
        if self._next not in ("**", "^"):
            return base
        self._take()
        return _raised(base, self._sign())

    def _atom(self) -> Fraction:
        token = self._take()
        if token == "(":
            value = self._sum()
            if self._take() != ")":
                raise ToolError("a bracket is not closed")
            return value
        if not token or token[0] not in ".0123456789":
            raise ToolError(f"a number is missing {f'before {token!r}' if token else 'at the end'}")
        return _bounded(Fraction(token))


def _multiplied(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "*":
        return left * right
    if right == 0:
        raise ToolError("division by zero")
    if operator == "/":
        return left / right
    return Fraction(left // right) if operator == "//" else left % right


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError(f"the exponent {exponent} is not a whole number")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    size = max(abs(base.numerator), base.denominator).bit_length()
    if abs(base) != 1 and base != 0 and size * abs(exponent.numerator) > MAX_BITS:
        raise ToolError("the result is too large")
    if abs(base) == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    return _bounded(base**exponent.numerator) if base != 0 or exponent != 0 else Fraction(1)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > MAX_BITS:
        raise ToolError("the result is too large")
    return value
