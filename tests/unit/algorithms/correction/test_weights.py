"""Importance weights against loops, with controls that swap the policies, forget a bound or normalise over the wrong things."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.correction import weights as module
from rlhub.algorithms.correction.weights import RATIOS, bounded, log_ratios, normalized, outside
from rlhub.config.sections.rollout_correction import Bounds
from tests.unit.algorithms.cases import assert_close, catches, few
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
