"""The rollout corrections on hundreds of random batches, larger than those of the unit tests."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.algorithms.correction.a3po import proximal_log_probs
from rlhub.algorithms.correction.correct import correct, token_factors
from rlhub.algorithms.correction.m2po import m2po_kept
from rlhub.algorithms.correction.rejection import kept
from rlhub.algorithms.correction.weights import RATIOS, bounded, normalized
from rlhub.algorithms.mismatch import extreme_metrics, mismatch_metrics, mismatch_sums, weight_extremes
from rlhub.config.sections.rollout_correction import rejection_bounds, weight_bounds
from tests.unit.algorithms.cases import assert_close, few
from tests.unit.algorithms.correction.correction_cases import (
    bands,
    cases,
    configs,
    levels,
    rules,
    slow_kept,
    slow_m2po,
    slow_weights,
    truncations,
)

many = settings(few, max_examples=400)
large = cases(12, 24)


@many
@given(large, levels, st.one_of(bands, truncations), st.booleans())
def test_weights(case, level, bounds, normalize) -> None:
    weights = bounded(RATIOS[level](case.log_ratio(), case.mask), case.mask, bounds)
    got = normalized(weights, case.mask, level) if normalize else weights
    assert_close(got, slow_weights(case, level, bounds, normalize))


@many
@given(large, rules())
def test_rules(case, rule) -> None:
    assert kept(case.log_ratio(), case.mask, *rule).long().tolist() == slow_kept(case, *rule)


@many
@given(large, st.sampled_from([1e-5, 0.01, 0.04, 0.1, 0.5, 2.0]))
def test_m2po(case, threshold) -> None:
    assert m2po_kept(case.log_ratio(), case.advantages, case.mask, threshold).long().tolist() == slow_m2po(case, threshold)


@many
@given(large, configs(), st.integers(1, 5), st.randoms())
def test_all_together(case, config, width, shuffle) -> None:
    """Against the loops, and with padding and in another order of rows."""
    result = correct(config, case.log_ratio(), case.mask, case.advantages)
    keep = case.mask.tolist()
    for rule, bounds in rejection_bounds(config.rollout_rs, config.rollout_rs_threshold).items():
        keep = [[a * b for a, b in zip(*row, strict=True)] for row in zip(keep, slow_kept(case, rule, bounds), strict=True)]
    keep = keep if config.m2po_threshold is None else slow_m2po(case, config.m2po_threshold, keep)
    factors = [[float(m) for m in row] for row in keep]
    if config.rollout_is is not None:
        limits = weight_bounds(config.rollout_is_threshold)
        weights = slow_weights(case, config.rollout_is, limits, config.rollout_is_batch_normalize)
        factors = [[w * m for w, m in zip(*row, strict=True)] for row in zip(weights, keep, strict=True)]
    assert_close(token_factors(result), factors)
    order = shuffle.sample(range(len(case.mask)), len(case.mask))
    other = case.rows(order).padded(width)
    again = token_factors(correct(config, other.log_ratio(), other.mask, other.advantages))
    assert_close(again[:, :-width], [factors[row] for row in order])
    assert not again[:, -width:].any()


@many
@given(large, st.integers(0, 2**31), st.booleans())
def test_a3po(case, seed, per_token) -> None:
    shape = case.mask.shape if per_token else case.mask.shape[:1]
    staleness = torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(seed))
    expected = [[0.0] * case.mask.shape[1] for _ in range(len(case.mask))]
    for i, t in case.mask.nonzero().tolist():
        d = int(staleness[i, t] if per_token else staleness[i])
        p, q = case.pi[i, t].item(), case.mu[i, t].item()
        expected[i][t] = p if d == 0 else q + (d - 1) / d * (p - q)
    assert_close(proximal_log_probs(case.pi, case.mu, staleness, case.mask), expected)


@many
@given(large)
def test_mismatch_over_single_rows_is_that_of_the_batch(case) -> None:
    whole = mismatch_sums(case.pi, case.mu, case.mask)
    parts = [mismatch_sums(case.pi[[i]], case.mu[[i]], case.mask[[i]]) for i in range(len(case.mask))]
    total = {name: float(sum(part[name] for part in parts)) for name in whole}
    assert_close(
        torch.tensor(list(mismatch_metrics(total).values()), dtype=torch.float64),
        list(mismatch_metrics({name: float(value) for name, value in whole.items()}).values()),
    )
    pairs = torch.stack([weight_extremes(case.pi[[i]], case.mu[[i]], case.mask[[i]]) for i in range(len(case.mask))])
    assert extreme_metrics(pairs.amax(0)) == extreme_metrics(weight_extremes(case.pi, case.mu, case.mask))
