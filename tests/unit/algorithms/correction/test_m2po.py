"""M2PO against the paper's loop: drop the largest until the second moment holds."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.correction.m2po import candidates, m2po_kept, second_moment
from tests.unit.algorithms.cases import catches, few
from tests.unit.algorithms.correction.correction_cases import cases, slow_m2po

settings = st.tuples(cases(8, 12), st.sampled_from([1e-5, 0.04, 0.1, 0.5, 2.0]))


def check(function, setting) -> None:
    case, threshold = setting
    kept = function(case.log_ratio(), case.advantages, case.mask, threshold)
    assert kept.long().tolist() == slow_m2po(case, threshold)


@few
@given(settings)
def test_kept_tokens(setting) -> None:
    check(m2po_kept, setting)


@few
@given(settings)
def test_the_moment_of_what_stays_is_under_the_threshold(setting) -> None:
    case, threshold = setting
    log_ratio = case.log_ratio()
    kept = m2po_kept(log_ratio, case.advantages, case.mask, threshold)
    left = candidates(log_ratio, case.advantages, kept)
    assert second_moment(log_ratio, left).item() <= threshold * (1 + 1e-12)


def test_broken_selections_are_caught() -> None:
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
        assert catches(check, broken, many)


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
    kept = m2po_kept(log_ratio, torch.ones(3, 1), torch.ones(3, 1), 0.14)
    assert kept[:, 0].tolist() == [False, False, True]


def test_nothing_to_hold() -> None:
    empty = torch.full((2, 3), math.nan, dtype=torch.float64)
    assert not m2po_kept(empty, empty, torch.zeros(2, 3), 0.04).any()
    apart = torch.full((1, 2), -9.0, dtype=torch.float64)
    assert m2po_kept(apart, torch.ones(1, 2), torch.ones(1, 2), 0.04).all()
    assert m2po_kept(apart, torch.zeros(1, 2), torch.ones(1, 2), 0.04).all()
