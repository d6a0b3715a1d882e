"""Losses on preference pairs against the papers' formulas pair by pair, with gradients by hand."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms import preference
from rlhub.algorithms.preference import BetaKnobs, PreferenceInputs, SigmoidKnobs
from rlhub.algorithms.registry import PREFERENCE_LOSSES
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, seeds

betas = st.sampled_from([0.05, 0.1, 0.5])
cases = st.tuples(seeds, st.integers(1, 6), dtypes, st.sampled_from([0.1, 3.0, 60.0]), betas, st.sampled_from([0.0, 0.1, 0.4]))


def columns(case, count: int = 4) -> list[torch.Tensor]:
    seed, pairs, dtype, scale, *_ = case
    rng = random.Random(seed)
    return [torch.tensor([scale * rng.uniform(-1, 1) for _ in range(pairs)], dtype=dtype) for _ in range(count)]


def inputs_of(case) -> PreferenceInputs:
    chosen, rejected, ref_chosen, ref_rejected = columns(case)
    return PreferenceInputs(
        chosen=chosen.requires_grad_(), rejected=rejected.requires_grad_(), ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def of_pair(name: str, h: float, beta: float, smoothing: float) -> tuple[float, float]:
    """(loss, d loss / d h) of one pair, from the papers."""
    if name == "sigmoid":
        loss = -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)
        return loss, beta * (-(1 - smoothing) * sigmoid(-beta * h) + smoothing * sigmoid(beta * h))
    if name == "ipo":
        return (h - 0.5 / beta) ** 2, 2 * (h - 0.5 / beta)
    return max(0.0, 1 - beta * h), -beta if beta * h < 1 else 0.0


def check(name: str):
    def compare(loss, case) -> None:
        beta, smoothing = case[4:]
        knobs = SigmoidKnobs(beta=beta, label_smoothing=smoothing) if name == "sigmoid" else BetaKnobs(beta=beta)
        inputs = inputs_of(case)
        got = loss(inputs, knobs)
        got.sum().backward()
        terms = zip(
            *(exact(column) for column in (inputs.chosen, inputs.ref_chosen, inputs.rejected, inputs.ref_rejected)), strict=True
        )
        expected = [of_pair(name, (won - ref_won) - (lost - ref_lost), beta, smoothing) for won, ref_won, lost, ref_lost in terms]
        size = max(abs(float(column.detach().abs().max())) for column in (inputs.chosen, inputs.rejected))
        assert_close(got, [value for value, _ in expected], amplification=1 + size)
        assert inputs.chosen.grad is not None and inputs.rejected.grad is not None
        assert_close(inputs.chosen.grad, [slope for _, slope in expected], amplification=1 + size)
        assert_close(inputs.rejected.grad, [-slope for _, slope in expected], amplification=1 + size)

    return compare


@pytest.mark.parametrize("name", PREFERENCE_LOSSES.names())
def test_formula_and_gradient(name: str) -> None:
    loss = PREFERENCE_LOSSES.get(name)
    few(given(cases)(lambda case: check(name)(loss, case)))()


def test_broken_variants_are_caught() -> None:
    def without_reference(inputs, knobs):
        zeros = torch.zeros_like(inputs.ref_chosen)
        return preference.dpo_sigmoid(dataclasses.replace(inputs, ref_chosen=zeros, ref_rejected=zeros), knobs)

    def swapped(inputs, knobs):
        return preference.dpo_sigmoid(
            PreferenceInputs(
                chosen=inputs.rejected,
                rejected=inputs.chosen,
                ref_chosen=inputs.ref_rejected,
                ref_rejected=inputs.ref_chosen,
            ),
            knobs,
        )

    def without_smoothing(inputs, knobs):
        return preference.dpo_sigmoid(inputs, dataclasses.replace(knobs, label_smoothing=0.0))

    def target_without_half(inputs, knobs):
        return (inputs.margin - 1 / knobs.beta).square()

    def margin_without_beta(inputs, knobs):
        return torch.relu(1 - inputs.margin)

    for broken in (without_reference, swapped, without_smoothing):
        assert catches(check("sigmoid"), broken, cases)
    assert catches(check("ipo"), target_without_half, cases)
    assert catches(check("hinge"), margin_without_beta, cases)


@few
@given(cases)
def test_swapped_labels_with_smoothing_are_the_other_label(case) -> None:
    """cDPO: smoothing by eps is the mean over a label that is wrong with probability eps."""
    inputs, beta, eps = inputs_of(case), case[4], case[5]
    other = PreferenceInputs(
        chosen=inputs.rejected, rejected=inputs.chosen, ref_chosen=inputs.ref_rejected, ref_rejected=inputs.ref_chosen
    )
    plain = SigmoidKnobs(beta=beta)
    mixed = (1 - eps) * preference.dpo_sigmoid(inputs, plain) + eps * preference.dpo_sigmoid(other, plain)
    smoothed = preference.dpo_sigmoid(inputs, SigmoidKnobs(beta=beta, label_smoothing=eps))
    assert torch.allclose(smoothed, mixed, rtol=1e-4 if case[2] == torch.float32 else 1e-12)


def test_at_the_reference_the_loss_is_log_two_and_the_margin_starts_to_grow() -> None:
    point = torch.tensor([-3.0, -700.0], dtype=torch.float64)
    inputs = PreferenceInputs(
        chosen=point.clone().requires_grad_(), rejected=point.clone().requires_grad_(), ref_chosen=point, ref_rejected=point
    )
    loss = preference.dpo_sigmoid(inputs, SigmoidKnobs())
    loss.sum().backward()
    assert_close(loss, [math.log(2)] * 2)
    assert_close(inputs.chosen.grad, [-0.05] * 2)  # beta / 2


@few
@given(cases, st.booleans())
def test_bradley_terry(case, with_margin: bool) -> None:
    def compare(loss, case) -> None:
        chosen, rejected, margin = (column.requires_grad_() for column in columns(case, 3))
        got = loss(chosen, rejected, margin if with_margin else None)
        got.sum().backward()
        expected, slopes = [], []
        for won, lost, gap in zip(exact(chosen), exact(rejected), exact(margin), strict=True):
            difference = won - lost - (gap if with_margin else 0.0)
            expected.append(-log_sigmoid(difference))
            slopes.append(-sigmoid(-difference))
        assert_close(got, expected, amplification=10)
        assert_close(chosen.grad, slopes, amplification=100)
        assert_close(rejected.grad, [-slope for slope in slopes], amplification=100)

    compare(preference.bradley_terry, case)


def test_a_margin_asks_for_more() -> None:
    chosen, rejected = torch.tensor([2.0]), torch.tensor([1.0])
    assert preference.bradley_terry(chosen, rejected, torch.tensor([3.0])) > preference.bradley_terry(chosen, rejected)
    assert_close(preference.bradley_terry(chosen, rejected, torch.tensor([1.0])), [math.log(2)])


@pytest.mark.parametrize(
    ("knobs", "text"),
    [({"beta": 0.0}, "beta"), ({"label_smoothing": 0.5}, "0.5"), ({"label_smoothing": -0.1}, "label_smoothing")],
)
def test_settings_without_meaning_are_refused(knobs: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SigmoidKnobs(**knobs)
    with pytest.raises(ValueError, match="beta"):
        BetaKnobs(beta=-1.0)


def test_extreme_margins_stay_finite() -> None:
    far = torch.tensor([1e4, -1e4])
    inputs = PreferenceInputs(chosen=far.requires_grad_(), rejected=-far.detach(), ref_chosen=far * 0, ref_rejected=far * 0)
    loss = preference.dpo_sigmoid(inputs, SigmoidKnobs(beta=1.0, label_smoothing=0.1))
    loss.sum().backward()
    assert bool(loss.isfinite().all()) and inputs.chosen.grad is not None and bool(inputs.chosen.grad.isfinite().all())
