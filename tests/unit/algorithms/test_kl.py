"""KL estimators element by element, their gradients and what they estimate in expectation; the coefficient's controller against
its recursion, and the penalised reward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.kl import AdaptiveKLController, FixedKLController, penalized_rewards
from rlhub.algorithms.registry import KL_ESTIMATORS
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

NAMES = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
cases = st.tuples(masks(), seeds, dtypes, st.sampled_from([0.0, 0.1, 2.0, 60.0]))


def pair(case) -> tuple[torch.Tensor, torch.Tensor]:
    mask, seed, dtype, distance = case
    return tensor(numbers(seed, mask, scale=distance), dtype), tensor(numbers(seed + 1, mask, scale=distance), dtype)


def check(named, case) -> None:
    name, estimator = named
    log_probs, reference = pair(case)
    both = zip(exact(log_probs), exact(reference), strict=True)
    expected = [[references.kl(name, x, y) for x, y in zip(*rows, strict=True)] for rows in both]
    assert_close(estimator(log_probs, reference), expected)


@pytest.mark.parametrize("suffix", ["", "+"])
@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, suffix: str) -> None:
    @few
    @given(cases)
    def run(case) -> None:
        check((name, KL_ESTIMATORS.get(name + suffix)), case)

    run()


@pytest.mark.parametrize("name", NAMES)
def test_swapped_arguments_or_another_estimator_are_caught(name: str) -> None:
    estimator = KL_ESTIMATORS.get(name)
    if references.kl(name, 0.0, 1.0) != references.kl(name, 1.0, 0.0):
        assert catches(check, (name, lambda x, y: estimator(y, x)), cases)
    other = KL_ESTIMATORS.get("abs" if name != "abs" else "k2")
    assert catches(check, (name, other), cases)


def test_unclamped_k3_is_caught() -> None:
    assert catches(check, ("k3", lambda x, y: (y - x).exp() - (y - x) - 1), cases)


def gradient(name: str, d: float) -> float:
    log_probs = torch.tensor([d], dtype=torch.float64, requires_grad=True)
    KL_ESTIMATORS.get(name)(log_probs, torch.zeros(1, dtype=torch.float64)).sum().backward()
    assert log_probs.grad is not None
    return log_probs.grad.item()


@pytest.mark.parametrize("d", [-1.5, -0.2, 0.4, 2.0])
def test_gradients(d: float) -> None:
    """Plain: the estimator's own derivative in log pi; with "+": always that of k2, which is d."""
    own = {"k1": 1.0, "abs": math.copysign(1.0, d), "k2": d, "k3": 1 - math.exp(-d)}
    for name, derivative in own.items():
        assert gradient(name, d) == pytest.approx(derivative)
        assert gradient(f"{name}+", d) == pytest.approx(d)


@pytest.mark.parametrize("d", [-30.0, 30.0])
def test_beyond_its_bounds_k3_has_no_gradient_of_its_own(d: float) -> None:
    assert gradient("k3", d) == 0.0 and gradient("k3+", d) == d


def categorical(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact expectation over the tokens of a small vocabulary: estimated KL, true KL, and their gradients in the logits."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.5, 0.0], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    true = (log_probs.exp() * (log_probs - reference)).sum()
    estimate = (log_probs.exp().detach() * KL_ESTIMATORS.get(name)(log_probs, reference)).sum()
    (true_gradient,) = torch.autograd.grad(true, logits, retain_graph=True)
    (estimate_gradient,) = torch.autograd.grad(estimate, logits)
    return estimate.detach(), true.detach(), estimate_gradient, true_gradient


def test_expectations_over_a_vocabulary() -> None:
    """k1 and k3 are unbiased in value; only k2's gradient, which the "+" variants take, is that of the KL."""
    for name in ("k1", "k3", "k1+", "k3+"):
        estimate, true, _, _ = categorical(name)
        assert estimate.item() == pytest.approx(true.item(), abs=1e-12)
    for name in ("k2", "k1+", "k3+", "abs+"):
        _, _, own, right = categorical(name)
        torch.testing.assert_close(own, right)
    _, _, nothing, right = categorical("k1")
    assert nothing.abs().max() < 1e-12 < right.abs().max()
    assert not torch.allclose(categorical("k3")[2], right)


def test_rows_say_which_gradients_are_not_the_kls() -> None:
    for name in KL_ESTIMATORS.names():
        _, _, own, right = categorical(name)
        assert ("value_only" in KL_ESTIMATORS.row(name).requires) == (not torch.allclose(own, right)), name


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_straight_through_gradients_and_bounds_far_away(name: str) -> None:
    """Log-ratios of +-50: values and gradients stay finite, k3 is bounded (without gradient there), "+" keeps pulling."""
    for d in (-50.0, 50.0):
        log_probs = torch.tensor([d], requires_grad=True)
        value = KL_ESTIMATORS.get(name)(log_probs, torch.zeros(1))
        (slope,) = torch.autograd.grad(value.sum(), log_probs)
        base = name.removesuffix("+")
        assert value.item() == pytest.approx(references.kl(base, d, 0.0))
        if name.endswith("+") or base in ("k2", "mse"):
            assert slope.item() == d
        else:
            assert slope.item() == (0.0 if base in ("k3", "low_var_kl") else 1.0 if base in ("k1", "kl") else math.copysign(1, d))


NEAR = [sign * size for size in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3) for sign in (-1.0, 1.0)]


@pytest.mark.parametrize("name", ["k3", "low_var_kl"])
def test_k3_keeps_its_gradient_near_the_reference(name: str) -> None:
    """Differences as they are between a policy and its reference in the first steps, around log-probs of every size: the
    gradient in float32 is 1 - exp(-d) as float64 has it, and no token's is lost."""
    reference = -torch.logspace(-4, 1.3, 400, dtype=torch.float64).float()
    distances = torch.tensor(NEAR).repeat_interleave(len(reference))
    log_probs = (reference.double().repeat(len(NEAR)) + distances.double()).float().requires_grad_()
    reference = reference.repeat(len(NEAR))
    values = KL_ESTIMATORS.get(name)(log_probs, reference)
    (slope,) = torch.autograd.grad(values.sum(), log_probs)
    d = log_probs.detach().double() - reference.double()  # what float32 has left of the distance
    torch.testing.assert_close(slope.double(), -torch.expm1(-d), rtol=1e-6, atol=0)
    assert bool((slope[d != 0] != 0).all())
    assert bool((values >= 0).all())
    torch.testing.assert_close(values.double(), torch.expm1(-d) + d, rtol=1e-6, atol=1e-10)


measured = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 512)), max_size=6)


@few
@given(measured, st.floats(0.01, 2), st.integers(100, 10000))
def test_adaptive(steps, target, horizon) -> None:
    controller, beta = AdaptiveKLController(0.2, target, horizon), 0.2
    for kl, samples in steps:
        error = kl / target - 1
        error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
        beta = beta * (1 + error * samples / horizon)
        controller.update(kl, samples)
        assert controller.value == pytest.approx(beta, rel=1e-12)


def test_it_rises_above_the_target_falls_below_and_rests_on_it() -> None:
    controller = AdaptiveKLController(1.0, 0.1, 1000)
    controller.update(0.1, 100)
    assert controller.value == pytest.approx(1.0)
    controller.update(1e6, 100)
    assert controller.value == pytest.approx(1.02)  # the error is clipped to 0.2
    controller.update(0.0, 100)
    assert controller.value == pytest.approx(1.02 * 0.98)


def test_fixed_stays() -> None:
    controller = FixedKLController(0.3)
    controller.update(100.0, 1000)
    assert controller.value == 0.3


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10), (0.1, 0), (-1.0, 10)])
def test_a_target_or_horizon_that_divides_by_nothing_is_refused(target: float, horizon: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        AdaptiveKLController(0.1, target, horizon)


penalty_cases = st.tuples(masks(), seeds, dtypes, st.floats(0, 2, width=32))


def check_penalty(penalize, case) -> None:
    mask, seed, dtype, beta = case
    keep = torch.tensor(mask)
    scores, kl = tensor(numbers(seed, mask), dtype), garbage(tensor(numbers(seed + 1, mask), dtype), keep)
    s, d = exact(scores), exact(kl)
    expected = [[s[i][t] - (beta * d[i][t] if m else 0.0) for t, m in enumerate(row)] for i, row in enumerate(mask)]
    assert_close(penalize(scores, kl, keep, beta), expected)


@few
@given(penalty_cases)
def test_penalty(case) -> None:
    check_penalty(penalized_rewards, case)


def test_a_penalty_of_the_wrong_sign_or_without_mask_is_caught() -> None:
    assert catches(check_penalty, lambda scores, kl, mask, beta: penalized_rewards(scores, -kl, mask, beta), penalty_cases)
    assert catches(check_penalty, lambda scores, kl, mask, beta: scores - beta * kl, penalty_cases)
