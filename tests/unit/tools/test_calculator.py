"""Exact arithmetic, and nothing else."""

from __future__ import annotations

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.tools.base import ToolError
from rlhub.tools.calculator import MAX_CHARACTERS, calculate, calculator, written


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("347*582", "201954"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.33333333333333333"),
        ("2/3", "0.66666666666666667"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2**10 - 2^3", "1016"),
        ("2**3**2", "512"),
        ("-2**2", "-4"),
        ("2**-2", "0.25"),
        ("-(3 - 5) × 4 ÷ 8", "1"),
        ("1e3 + .5", "1000.5"),
        ("0**0", "1"),
        ("(-1)**999999999", "-1"),
        ("1**99999999999", "1"),
        ("0**5", "0"),
        ("10 - 4 - 3", "3"),
        ("100 / 10 / 2", "5"),
        ("--5", "5"),
        ("-1/3", "-0.33333333333333333"),
        ("1/10**30", "0"),
    ],
)
def test_results(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("2+", "missing at the end"),
        ("*2", "missing before"),
        ("(2", "not closed"),
        ("2)", "operator is missing"),
        ("2 3", "operator is missing"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("5 % 0", "division by zero"),
        ("2**0.5", "not a whole number"),
        ("9**9**9", "too large"),
        ("(9**600)**600", "too large"),
        ("(1/9)**9999999", "too large"),
        ("9" * MAX_CHARACTERS + "9", "characters"),
        ("(" * 200 + "1" + ")" * 200, "brackets"),
        ("-" * 400 + "1", "brackets or signs"),
        ("__import__('os').system('true')", "no arithmetic"),
        ("x + 1", "no arithmetic"),
        ("1_000", "no arithmetic"),
        ("٣+1", "no arithmetic"),
        ("1e9999", "operator|arithmetic"),
        ("9**9999999999999999999999", "too large"),
    ],
)
def test_what_is_no_small_arithmetic_is_refused_at_once(expression: str, message: str) -> None:
    started = time.thread_time()  # what it computes, however long others had the core
    with pytest.raises(ToolError, match=message):
        calculator(expression)
    assert time.thread_time() - started < 0.5


def test_repeated_squares_stay_bounded() -> None:
    with pytest.raises(ToolError, match="too large"):
        calculate("9**600*9**600")


numbers = st.integers(0, 99).map(str)
expressions = st.recursive(
    numbers, lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({parts[0]}{parts[1]}{parts[2]})")
)


@settings(max_examples=30, deadline=None)
@given(expressions)
def test_it_agrees_with_python_on_fractions(expression: str) -> None:
    """The reference evaluates the same text, numbers as Fractions."""
    text = "".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(expression))
    try:
        expected = eval(text, {"Fraction": Fraction})  # text of our own making
    except ZeroDivisionError:
        with pytest.raises(ToolError):
            calculate(expression)
        return
    if len(expression) <= MAX_CHARACTERS:
        try:
            assert calculate(expression) == expected
        except ToolError as error:
            assert "too large" in str(error) or "brackets" in str(error)


def _parts(expression: str) -> list[str]:
    spaced = "".join(f" {letter} " if letter in "+-*/()" else letter for letter in expression)
    return spaced.split()


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="0123456789+-*/%^()e. x", max_size=40))
def test_any_text_gives_a_number_or_a_tool_error(text: str) -> None:
    with contextlib.suppress(ToolError):
        written(calculate(text))
