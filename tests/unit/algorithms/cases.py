"""Random batches with awkward masks, comparison to a scale, and the search that shows a check can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import Tensor

Table = list[list[float]]

few = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float64, torch.float32])


@st.composite
def masks(draw: st.DrawFn, max_rows: int = 6, max_width: int = 7) -> list[list[int]]:
    """Rows of equal width: one turn, several turns (zeros inside), full and empty."""
    width = draw(st.integers(1, max_width))
    one_turn = st.integers(0, width).map(lambda length: [1] * length + [0] * (width - length))
    turns = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    return draw(st.lists(st.one_of(one_turn, turns), min_size=1, max_size=max_rows))


def numbers(seed: int, mask: list[list[int]], *, scale: float = 1.0, low: float = -1.0) -> Table:
    """Uniform in scale * [low, 1), the shape of the mask."""
    generator = random.Random(seed)
    return [[scale * generator.uniform(low, 1.0) for _ in row] for row in mask]


def tensor(rows: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def exact(values: Tensor) -> Any:
    """The numbers a tensor holds after rounding to its dtype, as Python floats."""
    return values.double().tolist()


def garbage(values: Tensor, mask: Tensor) -> Tensor:
    """The same inside the mask, NaN outside."""
    return torch.where(mask.bool(), values, torch.full_like(values, float("nan")))


def assert_close(got: Tensor, expected: Any, *, amplification: float = 1.0) -> None:
    """To 1e-10 (float64) or 1e-5 (float32) of the largest expected number, or of 1.

    amplification: how much larger the formula makes the rounding errors of its inputs (a division by a small spread).
    """
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert got.shape == wanted.shape
    scale = max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
    tolerance = (1e-10 if got.dtype == torch.float64 else 1e-5 * max(1.0, amplification)) * scale
    difference = (got.detach().double() - wanted).abs()
    assert bool((difference <= tolerance).all()), f"got {got.tolist()}, expected {expected}, tolerance {tolerance}"


def catches(check: Callable[[Any, Any], None], broken: Any, cases: st.SearchStrategy[Any]) -> bool:
    """Whether `check(broken, case)` fails for some case: a control of the check."""

    def fails(case: Any) -> bool:
        try:
            check(broken, case)
        except AssertionError:
            return True
        return False

    try:
        find(cases, fails, settings=settings(few, max_examples=300, phases=[Phase.generate]), random=random.Random(7))
    except NoSuchExample:
        return False
    return True
