"""Importance weights and A-3PO's proximal policy against loops, with controls that swap the policies, forget a bound or normalise
over the wrong things."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.correction import weights as module
from rlhub.algorithms.correction.weights import RATIOS, bounded, log_ratios, normalized, outside, proximal_log_probs
from rlhub.config.sections.rollout_correction import Bounds
from tests.unit.algorithms.cases import assert_close, catches, exact, few, seeds
from tests.unit.algorithms.correction.correction_cases import bands, cases, levels, slow_weights, truncations

settings = st.tuples(cases(), levels, st.one_of(bands, truncations), st.booleans())


def weigh(case, level, bounds, normalize):
    weights = bounded(RATIOS[level](case.log_ratio(), case.mask), case.mask, bounds)
    return normalized(weights, case.mask, level) if normalize else weights


def check(function, setting) -> None:
    assert_close(function(*setting), slow_weights(*setting))


@few
@given(settings)
def test_weights(setting) -> None:
    check(weigh, setting)


def swapped(case, level, bounds, normalize):
    case = type(case)(case.mu, case.pi, case.advantages, case.mask)
    return weigh(case, level, bounds, normalize)


def untruncated(case, level, bounds, normalize):
    return weigh(case, level, Bounds(lower=bounds.lower, upper=math.inf), normalize)


def clipped_below(case, level, bounds, normalize):
    """A band that clamps instead of masking."""
    ratios = RATIOS[level](case.log_ratio(), case.mask).clamp(bounds.lower, bounds.upper) * case.mask
    return normalized(ratios, case.mask, level) if normalize else ratios


def over_tokens(case, level, bounds, normalize):
    """A sequence counted as often as it has tokens."""
    weights = weigh(case, level, bounds, False)
    return normalized(weights, case.mask, "token") if normalize else weights


@pytest.mark.parametrize("broken", [swapped, untruncated, clipped_below, over_tokens])
def test_broken_weights_are_caught(broken) -> None:
    assert catches(check, broken, settings)


def test_the_known_values() -> None:
    pi = torch.tensor([[math.log(0.9), math.log(0.1), 7.0]])
    mu = torch.tensor([[math.log(0.3), math.log(0.2), 7.0]])
    mask = torch.tensor([[1, 1, 0]])
    ratio = log_ratios(pi, mu, mask)
    assert_close(module.token_ratios(ratio, mask).float(), [[3.0, 0.5, 0.0]])
    assert_close(module.sequence_ratios(ratio, mask).float(), [[1.5, 1.5, 0.0]])
    tokens = module.token_ratios(ratio, mask)
    assert_close(bounded(tokens, mask, Bounds(lower=None, upper=2.0)).float(), [[2.0, 0.5, 0.0]])
    assert_close(bounded(tokens, mask, Bounds(lower=0.6, upper=5.0)).float(), [[3.0, 0.0, 0.0]])
    assert outside(tokens, mask, Bounds(lower=0.6, upper=2.0)).tolist() == [[True, True, False]]
    assert_close(normalized(tokens, mask, "token").float(), [[3 / 1.75, 0.5 / 1.75, 0.0]])


def test_policies_that_agree_have_weight_one_exactly_and_no_gradient_is_kept() -> None:
    pi = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.ones(1, 2)
    for level in RATIOS:
        weights = bounded(RATIOS[level](log_ratios(pi, pi.detach(), mask), mask), mask, Bounds(lower=None, upper=2.0))
        assert weights.tolist() == [[1.0, 1.0]] and not weights.requires_grad


def test_a_batch_whose_weights_are_all_zero_stays_zero_when_normalised() -> None:
    zero = torch.zeros(2, 3, dtype=torch.float64)
    for mask in (torch.ones(2, 3), torch.zeros(2, 3)):
        for level in RATIOS:
            assert normalized(zero, mask, level).tolist() == zero.tolist()


proximal_settings = st.tuples(cases(), seeds, st.booleans())


def versions(case, seed: int, per_token: bool) -> torch.Tensor:
    shape = case.mask.shape if per_token else case.mask.shape[:1]
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed))


def slow_proximal(case, staleness: torch.Tensor) -> list[list[float]]:
    table = []
    for i, (pi, mu, keep) in enumerate(zip(exact(case.pi), exact(case.mu), case.mask.tolist(), strict=True)):
        row = []
        for t, (p, q, m) in enumerate(zip(pi, mu, keep, strict=True)):
            d = int(staleness[i][t] if staleness.dim() == 2 else staleness[i])
            row.append((p if d == 0 else q + (d - 1) / d * (p - q)) if m else 0.0)
        table.append(row)
    return table


def check_proximal(function, setting) -> None:
    case, seed, per_token = setting
    staleness = versions(case, seed, per_token)
    assert_close(function(case.pi, case.mu, staleness, case.mask), slow_proximal(case, staleness))


@few
@given(proximal_settings)
def test_proximal_policy(setting) -> None:
    check_proximal(proximal_log_probs, setting)


def test_a_broken_proximal_policy_is_caught() -> None:
    assert catches(check_proximal, lambda pi, mu, d, mask: proximal_log_probs(mu, pi, d, mask), proximal_settings)
    assert catches(check_proximal, lambda pi, mu, d, mask: proximal_log_probs(pi, mu, d + 1, mask), proximal_settings)
    assert catches(
        check_proximal, lambda pi, mu, d, mask: proximal_log_probs(pi, mu, d, torch.ones_like(mask)), proximal_settings
    )


def test_one_version_behind_is_the_rollout_policy_and_none_the_current_one() -> None:
    pi, mu = torch.tensor([[-1.0, -1.3]], requires_grad=True), torch.tensor([[-2.1, -1.1]])
    mask = torch.ones(1, 2)
    assert torch.equal(proximal_log_probs(pi, mu, torch.tensor([1]), mask), mu)
    current = proximal_log_probs(pi, mu, torch.tensor([0]), mask)
    assert torch.equal(current, pi.detach()) and not current.requires_grad
    far = proximal_log_probs(pi, mu, torch.tensor([10**6]), mask)
    torch.testing.assert_close(far, pi.detach(), rtol=0, atol=1e-5)
