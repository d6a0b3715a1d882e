"""Masked reductions against loops; values outside the mask must not matter, NaN or not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.masked import masked_sum
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

cases = st.tuples(masks(), seeds, dtypes)


@few
@given(cases)
def test_sum(case) -> None:
    mask, seed, dtype = case
    values, keep = tensor(numbers(seed, mask, scale=3.0), dtype), torch.tensor(mask)
    noisy, rows = garbage(values, keep), exact(values)
    assert_close(masked_sum(noisy, keep), sum(references.inside(rows, mask)))
    assert_close(masked_sum(noisy, keep, dim=1), [sum(references.inside([row], [m])) for row, m in zip(rows, mask, strict=True)])


def test_no_gradient_flows_to_what_is_masked() -> None:
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]], requires_grad=True)
    (masked_sum(values, torch.tensor([[1, 0], [0, 1]])) * 3).backward()
    assert values.grad is not None and values.grad.tolist() == [[3.0, 0.0], [0.0, 3.0]]
