"""The KL coefficient's controller against its recursion, and the penalised reward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.kl_control import AdaptiveKLController, FixedKLController, penalized_rewards
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

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


cases = st.tuples(masks(), seeds, dtypes, st.floats(0, 2, width=32))


def check_penalty(penalize, case) -> None:
    mask, seed, dtype, beta = case
    keep = torch.tensor(mask)
    scores, kl = tensor(numbers(seed, mask), dtype), garbage(tensor(numbers(seed + 1, mask), dtype), keep)
    s, d = exact(scores), exact(kl)
    expected = [[s[i][t] - (beta * d[i][t] if m else 0.0) for t, m in enumerate(row)] for i, row in enumerate(mask)]
    assert_close(penalize(scores, kl, keep, beta), expected)


@few
@given(cases)
def test_penalty(case) -> None:
    check_penalty(penalized_rewards, case)


def test_a_penalty_of_the_wrong_sign_or_without_mask_is_caught() -> None:
    assert catches(check_penalty, lambda scores, kl, mask, beta: penalized_rewards(scores, -kl, mask, beta), cases)
    assert catches(check_penalty, lambda scores, kl, mask, beta: scores - beta * kl, cases)
