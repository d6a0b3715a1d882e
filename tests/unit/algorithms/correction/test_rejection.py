"""Every rejection rule against a loop over tokens and rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.correction import rejection
from rlhub.algorithms.correction.rejection import kept
from rlhub.config.sections.rollout_correction import DIVERGENCE_RULES, RATIO_RULES, Bounds
from tests.unit.algorithms.cases import catches, few
from tests.unit.algorithms.correction.correction_cases import RULES, cases, rules, slow_kept

settings = st.tuples(cases(), rules())


def check(function, setting) -> None:
    case, (rule, bounds) = setting
    assert function(case.log_ratio(), case.mask, rule, bounds).long().tolist() == slow_kept(case, rule, bounds)


@few
@given(settings)
def test_rules(setting) -> None:
    check(kept, setting)


def test_the_table_has_the_rules_that_the_settings_know() -> None:
    assert set(rejection.RULES) == set(RATIO_RULES) | set(DIVERGENCE_RULES) == set(RULES)


def test_broken_rules_are_caught() -> None:
    """Swapped policies; a mean over the padded width; no clamp; sequences judged token by token."""

    def padded_mean(log_ratio, mask, rule, bounds):
        width = torch.ones_like(mask)
        return kept(log_ratio, width, rule, bounds) & mask.bool()

    def each_token(log_ratio, mask, rule, bounds):
        _, _, kind = rule.rpartition("_")
        return kept(log_ratio, mask, f"token_{kind}", bounds)

    def exclusive(log_ratio, mask, rule, bounds):
        return ~kept(log_ratio, mask, rule, bounds) & mask.bool()

    assert catches(check, lambda log_ratio, mask, rule, bounds: kept(-log_ratio, mask, rule, bounds), settings)
    assert catches(check, padded_mean, st.tuples(cases(), st.just(("seq_mean_k2", Bounds(lower=None, upper=0.05)))))
    for broken in (each_token, exclusive):
        assert catches(check, broken, settings)


@pytest.mark.parametrize(("ratio", "passes"), [(0.5, True), (0.49, False), (5.0, True), (5.1, False), (3.0, True), (1.0, True)])
def test_a_band_bounds_the_ratio_of_rollout_over_trainer(ratio: float, passes: bool) -> None:
    """0.5 to 5 is not its own reciprocal: trainer over rollout would keep 0.49 and reject 3.  Ported command lines mean this."""
    log_ratio, mask = torch.tensor([[-math.log(ratio)]], dtype=torch.float64), torch.ones(1, 1)
    for rule in RATIO_RULES:
        assert kept(log_ratio, mask, rule, Bounds(lower=0.5, upper=5.0)).item() is passes


def test_one_token_far_off_rejects_its_sequence_by_sum_and_largest_but_not_by_mean() -> None:
    log_ratio = torch.tensor([[1.0] + [0.0] * 9], dtype=torch.float64)
    mask = torch.ones(1, 10)
    limit = Bounds(lower=None, upper=0.1)
    shares = {rule: kept(log_ratio, mask, rule, limit).double().mean().item() for rule in DIVERGENCE_RULES}
    assert shares["token_k2"] == 0.9
    assert (shares["seq_sum_k2"], shares["seq_max_k2"], shares["seq_max_k3"], shares["seq_mean_k2"]) == (0, 0, 0, 1)
