"""Where a knob's value comes from, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlhub.algorithms.knobs import knobs_for
from rlhub.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class Knobs:
    gamma: float = 0.5
    bound: float = 3.0

    def __post_init__(self) -> None:
        if self.bound <= 1:
            raise ValueError("bound must be above 1")


@dataclass(slots=True, kw_only=True)
class Section:
    gamma: float = 0.9
    other: int = 1


def test_kwargs_win_over_the_section_and_the_section_over_the_default() -> None:
    assert knobs_for(Knobs, Section(), {}, where="w") == Knobs(gamma=0.9, bound=3.0)
    assert knobs_for(Knobs, Section(), {"gamma": 0.1, "bound": 2.0}, where="w") == Knobs(gamma=0.1, bound=2.0)


def test_a_misspelled_knob_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.adv_kwargs\.gama: no such knob; did you mean 'gamma'\?; known: bound, gamma"
    ):
        knobs_for(Knobs, Section(), {"gama": 1.0}, where="algorithm.adv_kwargs")


def test_a_value_the_knobs_refuse_is_an_error_that_says_where() -> None:
    with pytest.raises(ConfigError, match="algorithm.adv_kwargs: bound must be above 1"):
        knobs_for(Knobs, Section(), {"bound": 0.5}, where="algorithm.adv_kwargs")


def test_an_algorithm_without_knobs_takes_none() -> None:
    assert knobs_for(None, Section(), {}, where="w") is None
    with pytest.raises(ConfigError, match=r"w\.gamma: no such knob; this algorithm has no knobs"):
        knobs_for(None, Section(), {"gamma": 1.0}, where="w")
