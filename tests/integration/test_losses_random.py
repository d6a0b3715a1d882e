"""Hundreds of random micro-batches for every policy loss: formula and gradient, masked garbage, cuts and weights."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.algorithms.registry import POLICY_LOSSES
from tests.unit.algorithms import loss_cases as lc
from tests.unit.algorithms.cases import few

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
