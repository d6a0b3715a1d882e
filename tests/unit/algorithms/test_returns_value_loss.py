"""The critic's clipped squared error against the formula token by token."""

from __future__ import annotations

import functools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms import returns as code
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

cases = st.tuples(masks(), seeds, dtypes, st.sampled_from([0.1, 0.5]), st.sampled_from([0.2, 2.0, 50.0]))


def columns(case) -> tuple[torch.Tensor, ...]:
    mask, seed, dtype, _, scale = case
    keep = torch.tensor(mask)
    values, old, returns = (garbage(tensor(numbers(seed + i, mask, scale=scale), dtype), keep) for i in range(3))
    return values.requires_grad_(), old, returns, keep


def check(loss, case) -> None:
    mask, bound = case[0], case[3]
    values, old, returns, keep = columns(case)
    outputs = loss(values, old, returns, keep, bound)
    v, o, g = exact(values), exact(old), exact(returns)
    places = [(i, t) for i, row in enumerate(mask) for t, m in enumerate(row) if m]
    expected = [[0.0] * len(row) for row in mask]
    clips = 0
    for i, t in places:
        expected[i][t], binds = references.value_token(v[i][t], o[i][t], g[i][t], bound)
        clips += binds
    assert_close(outputs.loss, expected)
    if case[2] == torch.float64:
        assert outputs.sums["vf_clipfrac"] == clips
    assert_close(outputs.sums["vpred"], math.fsum(v[i][t] for i, t in places))
    assert_close(outputs.sums["returns"], math.fsum(g[i][t] for i, t in places))
    assert_close(outputs.sums["returns_squared"], math.fsum(g[i][t] ** 2 for i, t in places))
    assert_close(outputs.sums["squared_error"], math.fsum((v[i][t] - g[i][t]) ** 2 for i, t in places))


@few
@given(cases)
def test_formula(case) -> None:
    check(code.value_loss, case)


def test_broken_variants_are_caught() -> None:
    def unclipped(values, old, returns, mask, bound):
        return code.value_loss(values, old, returns, mask, 1e9)

    def around_the_returns(values, old, returns, mask, bound):
        return code.value_loss(values, returns, returns, mask, bound)

    assert catches(check, unclipped, cases)
    assert catches(check, around_the_returns, cases)
    assert catches(check, functools.partial(lambda v, o, g, m, b: code.value_loss(v, o, g, torch.ones_like(m), b)), cases)


@few
@given(cases)
def test_garbage_outside_the_mask_gives_no_gradient_there_and_finite_ones_inside(case) -> None:
    values, old, returns, keep = columns(case)
    code.value_loss(values, old, returns, keep, case[3]).loss.sum().backward()
    assert values.grad is not None and bool(values.grad.isfinite().all())
    assert values.grad[keep == 0].count_nonzero() == 0


def test_sums_keep_the_variance_of_nearly_equal_returns_in_float32() -> None:
    returns = 100 + torch.arange(1000).reshape(10, 100) / 1e5
    mask = torch.ones_like(returns)
    sums = code.value_loss(returns, returns, returns, mask, 0.5).sums
    variance = sums["returns_squared"].item() / 1000 - (sums["returns"].item() / 1000) ** 2
    true = references.variance(exact(returns.flatten())) * 999 / 1000
    assert abs(variance - true) < 0.01 * true
    rounded = (returns.square().sum() / 1000 - (returns.sum() / 1000) ** 2).item()
    assert abs(rounded - true) > true  # in float32 the difference is noise


def check_gradient(loss, case) -> None:
    """V - G where the plain error counts, nothing where the clipped one does."""
    mask, _, _, bound, _ = case
    values, old, returns, keep = columns(case)
    (found,) = torch.autograd.grad(loss(values, old, returns, keep, bound).loss.sum(), values)
    v, o, g = exact(values), exact(old), exact(returns)
    expected = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        for t, m in enumerate(row):
            if m and not references.value_token(v[i][t], o[i][t], g[i][t], bound)[1]:
                expected[i][t] = v[i][t] - g[i][t]
    assert_close(found, expected)


@few
@given(cases)
def test_gradient(case) -> None:
    check_gradient(code.value_loss, case)


def test_an_optimistic_or_unclipped_gradient_is_caught() -> None:
    def optimistic(values, old, returns, mask, bound):
        outputs = code.value_loss(values, old, returns, mask, bound)
        held = old + (values - old).clamp(-bound, bound)
        loss = torch.minimum((values - returns) ** 2, (held - returns) ** 2) / 2
        outputs.loss = torch.where(mask.bool(), loss, torch.zeros_like(loss))
        return outputs

    assert catches(check_gradient, optimistic, cases)
    assert catches(check_gradient, lambda v, o, g, m, b: code.value_loss(v, o, g, m, 1e9), cases)


def test_a_value_may_always_come_back() -> None:
    """Beyond the bound away from the target: no gradient is lost; beyond it towards the target: none flows."""
    for value, target, gradient in ((2.0, -1.0, 3.0), (2.0, 5.0, 0.0), (0.3, 5.0, -4.7)):
        now = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
        old, wanted, one = torch.zeros(1, 1), torch.tensor([[target]], dtype=torch.float64), torch.ones(1, 1)
        code.value_loss(now, old, wanted, one, 0.5).loss.sum().backward()
        assert now.grad is not None and math.isclose(now.grad.item(), gradient, abs_tol=1e-12)


def test_rounding_is_not_counted_as_a_clip() -> None:
    old, near = (scale * torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).tanh() for scale in (0.3, -0.1))
    assert code.value_loss(near, old, -old, torch.ones(50, 40), 0.5).sums["vf_clipfrac"] == 0
    assert bool((old + (near - old) != near).any())  # what such a clip would compare
