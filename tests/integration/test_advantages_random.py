"""Every advantage estimator on hundreds of random batches: its formula against loops, and what must not matter to it.

What is drawn: single turns, tool output between turns, empty rows, groups of one to all, few, dense, equal and extreme
rewards, both precisions, narrow and wide; NaN wherever the mask is 0.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.advantages.estimators import (
    REFERENCES,
    RUNS,
    cases,
    check,
    check_invalid,
    check_rearranged,
    estimate,
    run_id,
)
from tests.unit.algorithms.cases import few

many, hundred = settings(few, max_examples=250), settings(few, max_examples=100)
every_name = pytest.mark.parametrize("name", sorted(REFERENCES))


@pytest.mark.parametrize(("name", "knobs"), RUNS, ids=run_id)
@many
@given(case=cases)
def test_formula(name: str, knobs: dict[str, Any], case: Any) -> None:
    check(lambda inputs: estimate(name, knobs, inputs), case, name, knobs)


@every_name
@hundred
@given(case=cases, seed=st.integers(0, 10**6), extra=st.integers(1, 70))
def test_padding_row_order_and_group_names_do_not_matter(name: str, case: Any, seed: int, extra: int) -> None:
    check_rearranged(name, case, seed, extra)


@every_name
@hundred
@given(case=cases, count=st.integers(1, 4))
def test_invalid_samples_move_nobody(name: str, case: Any, count: int) -> None:
    check_invalid(name, case, count)
