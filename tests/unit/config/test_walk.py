"""Conversion of single values, and building dataclasses from containers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rlhub.config.schema import Bounds, PositiveInt, UnitFloat, describe
from rlhub.config.walk import build, convert


@pytest.mark.parametrize(
    ("annotation", "value", "wanted"),
    [
        (int, 3.0, 3),
        (float, 3, 3.0),
        (str, 7, "7"),
        (int | None, None, None),
        (list[str], "a", ["a"]),
        (list[float], (1, 2), [1.0, 2.0]),
        (str | list[str], "a", "a"),
        (str | list[str], ["a"], ["a"]),
        (PositiveInt | None, 1, 1),
        (UnitFloat, 1, 1.0),
        (dict[str, Any], {"a": None}, {"a": None}),
        (Literal["a", "b"], "b", "b"),
        (Any, None, None),
    ],
)
def test_convert(annotation: Any, value: Any, wanted: Any) -> None:
    result = convert(annotation, value)
    assert result == wanted and type(result) is type(wanted)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 3.5),
        (int, True),
        (int, "3"),
        (int, float("inf")),
        (float, True),
        (bool, 0),
        (str, True),
        (str, None),
        (list[str], {"a": 1}),
        (list[int], ["a"]),
        (dict[str, Any], [1]),
        (PositiveInt, 0),
        (UnitFloat, float("nan")),
        (Literal["a"], "b"),
    ],
)
def test_convert_refuses(annotation: Any, value: Any) -> None:
    with pytest.raises(ValueError):
        convert(annotation, value)


@dataclass(slots=True, kw_only=True)
class Part:
    size: PositiveInt = 4


@dataclass(slots=True, kw_only=True)
class Whole:
    part: Part = field(default_factory=Part)
    other: Part | None = None
    name: str = "x"


def test_build_collects_every_problem_and_keeps_going() -> None:
    problems: list[str] = []
    built = build(Whole, {"part": {"size": 0}, "other": {"size": 9}, "name": [1]}, problems)
    assert built == Whole(other=Part(size=9))
    assert [problem.partition(":")[0] for problem in problems] == ["part.size", "name"]


def test_build_refuses_a_value_for_a_section() -> None:
    problems: list[str] = []
    assert build(Whole, {"part": 3, "other": None}, problems) == Whole()
    assert len(problems) == 1 and problems[0].startswith("part: got 3, expected section")


def test_bounds_say_what_they_hold() -> None:
    bounds = Bounds(gt=0, le=1)
    assert [bounds.holds(value) for value in (0, 0.5, 1, 1.1)] == [False, True, True, False]
    assert str(bounds) == "> 0 and <= 1"
    assert describe(PositiveInt | None) == "int >= 1, or null"
