"""The clipped surrogate against the formula token by token, with ratios far outside the clip range."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.inputs import PolicyLossInputs, PolicyLossOutputs
from rlhub.algorithms.policy_losses.vanilla import VanillaKnobs, vanilla
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

knobs = st.builds(
    VanillaKnobs,
    clip_ratio=st.sampled_from([0.0, 0.2]),
    clip_ratio_low=st.sampled_from([None, 0.1]),
    clip_ratio_high=st.sampled_from([None, 0.28]),
    clip_ratio_c=st.sampled_from([1.5, 3.0]),
)
cases = st.tuples(masks(), seeds, dtypes, st.sampled_from([0.0, 0.3, 3.0, 40.0]), st.booleans(), knobs)


def inputs_of(case) -> PolicyLossInputs:
    mask, seed, dtype, distance, weighted, _ = case
    keep = torch.tensor(mask)
    old = tensor(numbers(seed, mask, scale=5.0), dtype)
    new = old + tensor(numbers(seed + 1, mask, scale=distance), dtype)
    weights = tensor(numbers(seed + 3, mask, scale=2.0, low=0.0), dtype)
    return PolicyLossInputs(
        log_probs=garbage(new, keep).requires_grad_(),
        old_log_probs=garbage(old, keep),
        advantages=garbage(tensor(numbers(seed + 2, mask, scale=2.0), dtype), keep),
        response_mask=keep,
        weights=garbage(weights, keep) if weighted else None,
    )


def check(loss, case) -> None:
    inputs, settings = inputs_of(case), case[-1]
    outputs = loss(inputs, settings)
    low = settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low
    high = settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high
    new, old, advantages = exact(inputs.log_probs), exact(inputs.old_log_probs), exact(inputs.advantages)
    weights = exact(inputs.weights) if inputs.weights is not None else None
    expected, clipped, dual, drift = [], 0, 0, 0.0
    for i, row in enumerate(inputs.response_mask.tolist()):
        expected.append([0.0] * len(row))
        for t, m in enumerate(row):
            if not m:
                continue
            value, binds, lower = references.ppo_token(new[i][t], old[i][t], advantages[i][t], low, high, settings.clip_ratio_c)
            expected[i][t] = value * (weights[i][t] if weights is not None else 1.0)
            clipped, dual = clipped + binds, dual + lower
            drift -= max(-20.0, min(20.0, new[i][t] - old[i][t]))
    assert_close(outputs.loss, expected)
    assert_close(outputs.sums["ppo_kl"], drift, amplification=10.0)
    if case[2] == torch.float64:  # a count may differ by a token when float32 rounds a ratio onto its bound
        assert (outputs.sums["pg_clipfrac"], outputs.sums["pg_clipfrac_lower"]) == (clipped, dual)


@few
@given(cases)
def test_formula(case) -> None:
    check(vanilla, case)


def without_dual_clip(inputs: PolicyLossInputs, settings: VanillaKnobs) -> PolicyLossOutputs:
    return vanilla(inputs, dataclasses.replace(settings, clip_ratio_c=math.inf))


def one_bound(inputs: PolicyLossInputs, settings: VanillaKnobs) -> PolicyLossOutputs:
    return vanilla(inputs, dataclasses.replace(settings, clip_ratio_low=None, clip_ratio_high=None))


def swapped_bounds(inputs: PolicyLossInputs, settings: VanillaKnobs) -> PolicyLossOutputs:
    return vanilla(
        inputs, dataclasses.replace(settings, clip_ratio_low=settings.clip_ratio_high, clip_ratio_high=settings.clip_ratio_low)
    )


def without_weights(inputs: PolicyLossInputs, settings: VanillaKnobs) -> PolicyLossOutputs:
    return vanilla(dataclasses.replace(inputs, weights=None), settings)


def swapped_policies(inputs: PolicyLossInputs, settings: VanillaKnobs) -> PolicyLossOutputs:
    return vanilla(dataclasses.replace(inputs, log_probs=inputs.old_log_probs, old_log_probs=inputs.log_probs), settings)


@pytest.mark.parametrize("broken", [without_dual_clip, one_bound, swapped_bounds, without_weights, swapped_policies])
def test_broken_variants_are_caught(broken) -> None:
    assert catches(check, broken, cases)


def gradient_of(log_ratio: float, advantage: float, settings: VanillaKnobs | None = None) -> float:
    new = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    inputs = PolicyLossInputs(log_probs=new, old_log_probs=0 * one, advantages=advantage * one, response_mask=one)
    vanilla(inputs, settings or VanillaKnobs()).loss.sum().backward()
    assert new.grad is not None
    return new.grad.item()


def test_gradient_is_that_of_the_ratio_inside_and_nothing_outside_the_bounds() -> None:
    assert gradient_of(0.0, 2.0) == pytest.approx(-2.0)  # on-policy: -A grad log pi
    assert gradient_of(0.1, 2.0) == pytest.approx(-2.0 * math.exp(0.1))
    assert gradient_of(0.3, 2.0) == 0.0  # clipped above
    assert gradient_of(-0.3, -2.0) == 0.0  # clipped below
    assert gradient_of(-0.3, 2.0) == pytest.approx(-2.0 * math.exp(-0.3))  # a worse policy may always recover
    assert gradient_of(1.0, -2.0) == pytest.approx(2.0 * math.e)
    assert gradient_of(1.2, -2.0) == 0.0  # dual clip: e^1.2 > 3
    assert gradient_of(0.3, 2.0, VanillaKnobs(clip_ratio_high=0.5)) == pytest.approx(-2.0 * math.exp(0.3))


@few
@given(cases)
def test_garbage_outside_the_mask_gives_no_gradient_there_and_finite_ones_inside(case) -> None:
    inputs = inputs_of(case)
    vanilla(inputs, case[-1]).loss.sum().backward()
    gradient = inputs.log_probs.grad
    assert gradient is not None and bool(gradient.isfinite().all())
    assert gradient[inputs.response_mask == 0].count_nonzero() == 0


def test_a_dual_clip_that_would_bound_every_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_ratio_c must be above 1"):
        VanillaKnobs(clip_ratio_c=1.0)
