"""Conversion of single values, and building dataclasses from containers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rlhub.config.load import build, convert
from rlhub.config.schema import Leaf, PositiveInt, PositiveOrInf, Range, Seed, UnitFloat, describe, leaves
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.rollout import TopK
from rlhub.config.sections.serve import ServeConfig
from rlhub.config.sections.sft import SFTConfig


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
    bounds = Range(gt=0, le=1)
    assert [bounds.holds(value) for value in (0, 0.5, 1, 1.1)] == [False, True, True, False]
    assert str(bounds) == "> 0 and <= 1"
    assert describe(PositiveInt | None) == "int >= 1, or null"


NUMBERS = [
    leaf
    for cls in (PPOConfig, SFTConfig, DPOConfig, RMConfig, ServeConfig)
    for leaf in leaves(cls)
    if "number" in describe(leaf.annotation) and "string" not in describe(leaf.annotation)
]


@pytest.mark.parametrize("leaf", {leaf.key: leaf for leaf in NUMBERS}.values(), ids=lambda leaf: leaf.key)
def test_no_setting_takes_nan_and_only_declared_ones_infinity(leaf: Leaf) -> None:
    """A NaN passes every comparison and spoils every step; infinity means something only where there may be no limit."""
    wrong = [float("nan")] if "or inf" in describe(leaf.annotation) else [float("nan"), float("inf"), -float("inf"), 10**400]
    as_list = "list of" in describe(leaf.annotation)
    for value in wrong:
        with pytest.raises(ValueError):
            convert(leaf.annotation, [value] if as_list else value)


def test_only_bounds_that_may_be_absent_take_infinity() -> None:
    infinite = {leaf.key.rpartition(".")[2] for leaf in NUMBERS if "or inf" in describe(leaf.annotation)}
    assert infinite == {"clip_ratio_high", "grad_clip", "cliprange_value"}
    assert convert(PositiveOrInf, float("inf")) == float("inf")


def test_nan_in_a_mapping_of_the_users_own_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.b\.1 is not a number"):
        convert(dict[str, Any], {"a": {"b": [1.0, float("nan")]}})


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    assert convert(Seed, 2**32 - 1) == 2**32 - 1
    for value in (-1, 2**32, 10**23, 10**400):
        with pytest.raises(ValueError):
            convert(Seed, value)
    with pytest.raises(ValueError, match="larger than"):
        convert(int, 10**400)


def test_top_k_of_0_is_neither_a_number_of_tokens_nor_off() -> None:
    """It would pass here and fail in the first generation."""
    assert (convert(TopK, -1), convert(TopK, 1)) == (-1, 1)
    for value in (0, -2):
        with pytest.raises(ValueError, match="must be >= 1, or -1 \\(off\\)"):
            convert(TopK, value)
