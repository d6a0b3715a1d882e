"""Hundreds of random micro-batches for every policy loss (formula and gradient, masked garbage, cuts, weights), and for
aggregation, value loss, KL estimators and the choice of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.algorithms.aggregation import aggregate
from rlhub.algorithms.registry import KL_ESTIMATORS, POLICY_LOSSES
from rlhub.algorithms.value_loss import value_loss
from tests.unit.algorithms import loss_cases as lc
from tests.unit.algorithms import test_aggregation as aggregation_tests
from tests.unit.algorithms import test_kl as kl_tests
from tests.unit.algorithms import test_value_loss as value_tests
from tests.unit.algorithms.cases import few
from tests.unit.algorithms.policy_losses import test_covariance as covariance_tests

many = settings(few, max_examples=200)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_loss(name: str) -> None:
    loss = POLICY_LOSSES.get(name)

    @many
    @given(lc.cases(name, width=12), st.data(), st.sampled_from(lc.MODES))
    def run(case: lc.Case, data: st.DataObject, mode: str) -> None:
        lc.check_formula(name, loss, case)
        lc.check_masked_garbage(loss, case)
        lc.check_cut(loss, case, data.draw(lc.cuts(len(case.mask))), mode)
        lc.check_weights(loss, case)

    run()


@many
@given(aggregation_tests.cases)
def test_aggregation_of_any_cut(case) -> None:
    aggregation_tests.check(aggregate, case)
    aggregation_tests.check_gradient(aggregate, case)


@many
@given(value_tests.cases)
def test_value_loss_and_its_gradient(case) -> None:
    value_tests.check(value_loss, case)
    value_tests.check_gradient(value_loss, case)


@many
@given(st.sampled_from(kl_tests.NAMES), st.sampled_from(["", "+"]), kl_tests.cases)
def test_kl_estimators(name: str, suffix: str, case) -> None:
    kl_tests.check((name, KL_ESTIMATORS.get(name + suffix)), case)


@pytest.mark.parametrize("name", covariance_tests.PARTS)
def test_selections(name: str) -> None:
    @many
    @given(covariance_tests.cases(name))
    def run(case) -> None:
        covariance_tests.check(name, POLICY_LOSSES.companion(name, "select"), case)

    run()
