"""Every rejection rule against a loop over tokens and rows, and M2PO against the paper's: drop the largest until the second
moment holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.correction import correct
from rlhub.algorithms.correction.correct import candidates, kept, m2po_kept, second_moment
from rlhub.config.sections.rollout_correction import DIVERGENCE_RULES, RATIO_RULES, Bounds
from tests.unit.algorithms.cases import catches, few
from tests.unit.algorithms.correction.correction_cases import RULES, cases, rules, slow_kept, slow_m2po

settings = st.tuples(cases(), rules())


def check(function, setting) -> None:
    case, (rule, bounds) = setting
    assert function(case.log_ratio(), case.mask, rule, bounds).long().tolist() == slow_kept(case, rule, bounds)


@few
@given(settings)
def test_rules(setting) -> None:
    check(kept, setting)


def test_the_table_has_the_rules_that_the_settings_know() -> None:
    assert set(correct.RULES) == set(RATIO_RULES) | set(DIVERGENCE_RULES) == set(RULES)


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


m2po_settings = st.tuples(cases(8, 12), st.sampled_from([1e-5, 0.04, 0.1, 0.5, 2.0]))


def check_m2po(function, setting) -> None:
    case, threshold = setting
    remaining = function(case.log_ratio(), case.advantages, case.mask, threshold)
    assert remaining.long().tolist() == slow_m2po(case, threshold)


@few
@given(m2po_settings)
def test_m2po(setting) -> None:
    check_m2po(m2po_kept, setting)


@few
@given(m2po_settings)
def test_the_moment_of_what_stays_is_under_the_threshold(setting) -> None:
    case, threshold = setting
    log_ratio = case.log_ratio()
    remaining = m2po_kept(log_ratio, case.advantages, case.mask, threshold)
    left = candidates(log_ratio, case.advantages, remaining)
    assert second_moment(log_ratio, left).item() <= threshold * (1 + 1e-12)


def test_a_broken_m2po_is_caught() -> None:
    """All tokens instead of those a trust region holds; the smallest first; one token too few; rows by themselves."""

    def all_tokens(log_ratio, advantages, mask, threshold):
        return m2po_kept(log_ratio, log_ratio.sign(), mask, threshold)

    def by_limit(log_ratio, advantages, mask, threshold):
        return mask.bool() & ~(candidates(log_ratio, advantages, mask) & (log_ratio.square() > threshold))

    def each_row(log_ratio, advantages, mask, threshold):
        rows = zip(log_ratio, advantages, mask, strict=True)
        return torch.cat([m2po_kept(*(part[None] for part in row), threshold) for row in rows])

    def opposite(log_ratio, advantages, mask, threshold):
        return m2po_kept(log_ratio, -advantages, mask, threshold)

    many = st.tuples(cases(8, 12).filter(lambda case: case.mask.sum() > 12 and case.pi[0, 0] != case.mu[0, 0]), st.just(0.04))
    for broken in (all_tokens, by_limit, each_row, opposite):
        assert catches(check_m2po, broken, many)


def test_the_known_values() -> None:
    log_ratio = torch.tensor([[0.1, 0.5, -0.5, 0.3]], dtype=torch.float64)
    advantages, mask = torch.tensor([[1.0, 1.0, 1.0, 1.0]]), torch.ones(1, 4)
    # candidates 0.1, 0.5, 0.3: moments 0.01, 0.25, 0.09, mean 0.117; without the largest 0.05; without both 0.01
    assert m2po_kept(log_ratio, advantages, mask, 0.12).tolist() == [[True, True, True, True]]
    assert m2po_kept(log_ratio, advantages, mask, 0.06).tolist() == [[True, False, True, True]]
    assert m2po_kept(log_ratio, advantages, mask, 0.04).tolist() == [[True, False, True, False]]
    assert m2po_kept(log_ratio, advantages, mask, 0.001).tolist() == [[False, False, True, False]]


def test_equally_large_ones_go_together_so_the_order_of_rows_does_not_matter() -> None:
    log_ratio = torch.tensor([[0.5], [0.5], [0.1]], dtype=torch.float64)
    remaining = m2po_kept(log_ratio, torch.ones(3, 1), torch.ones(3, 1), 0.14)
    assert remaining[:, 0].tolist() == [False, False, True]


def test_nothing_to_hold() -> None:
    empty = torch.full((2, 3), math.nan, dtype=torch.float64)
    assert not m2po_kept(empty, empty, torch.zeros(2, 3), 0.04).any()
    apart = torch.full((1, 2), -9.0, dtype=torch.float64)
    assert m2po_kept(apart, torch.ones(1, 2), torch.ones(1, 2), 0.04).all()
    assert m2po_kept(apart, torch.zeros(1, 2), torch.ones(1, 2), 0.04).all()
