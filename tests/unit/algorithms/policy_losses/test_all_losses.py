"""Every registered policy loss against its loop in value and gradient, and what none of them may depend on."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.algorithms.registry import POLICY_LOSSES
from tests.unit.algorithms import loss_cases as lc
from tests.unit.algorithms.cases import catches, few
from tests.unit.algorithms.loss_references import REFERENCES

NAMES = POLICY_LOSSES.names()
some = settings(few, max_examples=15)
each_loss = pytest.mark.parametrize("name", NAMES)


def test_every_loss_has_a_reference() -> None:
    assert set(REFERENCES) == set(lc.KNOBS) == set(NAMES)


@each_loss
def test_value_gradient_and_metrics(name: str) -> None:
    @some
    @given(lc.cases(name))
    def run(case: lc.Case) -> None:
        lc.check_formula(name, POLICY_LOSSES.get(name), case)

    run()


@each_loss
def test_garbage_outside_the_mask_changes_nothing(name: str) -> None:
    @some
    @given(lc.cases(name))
    def run(case: lc.Case) -> None:
        lc.check_masked_garbage(POLICY_LOSSES.get(name), case)

    run()


@each_loss
def test_the_gradient_of_a_step_does_not_depend_on_the_cut(name: str) -> None:
    @some
    @given(lc.cases(name), st.data(), st.sampled_from(lc.MODES))
    def run(case: lc.Case, data: st.DataObject, mode: str) -> None:
        lc.check_cut(POLICY_LOSSES.get(name), case, data.draw(lc.cuts(len(case.mask))), mode)

    run()


@each_loss
def test_weights_multiply_once(name: str) -> None:
    @some
    @given(lc.cases(name))
    def run(case: lc.Case) -> None:
        lc.check_weights(POLICY_LOSSES.get(name), case)

    run()


# --- controls: each check above can fail


def broken(name: str, change) -> lc.Loss:
    return lambda inputs, knobs: POLICY_LOSSES.get(name)(change(inputs), knobs)


def other_sign(inputs):
    return dataclasses.replace(inputs, advantages=-inputs.advantages)


def weights_twice(inputs):
    return dataclasses.replace(inputs, weights=None if inputs.weights is None else inputs.weights**2)


def swapped_policies(inputs):
    """Old and rollout policy change places with the new one's value; the gradient stays where it is."""
    swapped = inputs.log_probs - inputs.log_probs.detach() + inputs.old_log_probs
    old = inputs.log_probs.detach()
    return dataclasses.replace(inputs, log_probs=swapped, old_log_probs=old, rollout_log_probs=old)


@each_loss
@pytest.mark.parametrize("change", [other_sign, weights_twice, swapped_policies])
def test_a_wrong_sign_weight_or_policy_is_caught(name: str, change) -> None:
    assert catches(functools.partial(lc.check_formula, name), broken(name, change), lc.cases(name))


SIDES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("vanilla", "clip_cov", "cpgd"), ("clip_ratio_low", "clip_ratio_high")),
    **dict.fromkeys(("gspo", "geo_mean"), ("clip_low", "clip_high")),
    **dict.fromkeys(("dppo_tv", "dppo_kl"), ("divergence_low", "divergence_high")),
    "sapo": ("tau_pos", "tau_neg"),
}


@pytest.mark.parametrize("name", SIDES)
def test_exchanged_sides_are_caught(name: str) -> None:
    low, high = SIDES[name]

    def exchanged(inputs, knobs):
        values = {low: getattr(knobs, high), high: getattr(knobs, low)}
        return POLICY_LOSSES.get(name)(inputs, dataclasses.replace(knobs, **values))

    assert catches(functools.partial(lc.check_formula, name), exchanged, lc.cases(name))


IGNORED = {
    "vanilla": ("clip_ratio_c", 1e9),
    "kl_cov": ("ppo_kl_coef", 0.0),
    "cispo": ("clip_low", None),
    "cpgd": ("drift_coef", 0.0),
    "dppo_tv": ("ratio_cap", 1e9),
    "dppo_kl": ("ratio_cap", 1e9),
}


@pytest.mark.parametrize("name", IGNORED)
def test_an_ignored_knob_is_caught(name: str) -> None:
    knob, value = IGNORED[name]

    def without(inputs, knobs):
        return POLICY_LOSSES.get(name)(inputs, dataclasses.replace(knobs, **{knob: value}))

    assert catches(functools.partial(lc.check_formula, name), without, lc.cases(name))


def test_a_loss_with_statistics_of_the_micro_batch_is_caught() -> None:
    def centred(inputs, knobs):
        mean = inputs.advantages.nanmean()
        return POLICY_LOSSES.get("vanilla")(dataclasses.replace(inputs, advantages=inputs.advantages - mean), knobs)

    def check(loss, drawn):
        case, mode = drawn
        lc.check_cut(loss, case, [[row] for row in range(len(case.mask))], mode)

    assert catches(check, centred, st.tuples(lc.cases("vanilla"), st.sampled_from(lc.MODES)))


def test_a_mask_applied_after_the_arithmetic_is_caught() -> None:
    def late(inputs, knobs):
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        loss = torch.where(inputs.response_mask.bool(), -inputs.advantages * ratio, torch.zeros_like(ratio))
        return dataclasses.replace(POLICY_LOSSES.get("vanilla")(inputs, knobs), loss=loss)

    assert catches(lc.check_masked_garbage, late, lc.cases("vanilla"))
