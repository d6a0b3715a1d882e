"""All corrections together: what is combined with what, what the metrics count, and what may not matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.correction.correct import correct, token_factors
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig, rejection_bounds, weight_bounds
from tests.unit.algorithms.cases import assert_close, few
from tests.unit.algorithms.correction.correction_cases import Case, cases, configs, slow_kept, slow_m2po, slow_weights

settings = st.tuples(cases(), configs())


def run(config: RolloutCorrectionConfig, case: Case):
    return correct(config, case.log_ratio(), case.mask, case.advantages)


def count(mask) -> int:
    return sum(map(sum, mask))


def expected_keep(config: RolloutCorrectionConfig, case: Case):
    keep = case.mask.tolist()
    for rule, bounds in rejection_bounds(config.rollout_rs, config.rollout_rs_threshold).items():
        passed = slow_kept(case, rule, bounds)
        keep = [[a * b for a, b in zip(*rows, strict=True)] for rows in zip(keep, passed, strict=True)]
    return keep if config.m2po_threshold is None else slow_m2po(case, config.m2po_threshold, keep)


@few
@given(settings)
def test_rules_must_all_pass_m2po_sees_what_they_leave_and_weights_see_everything(setting) -> None:
    case, config = setting
    result, keep = run(config, case), expected_keep(config, case)
    assert result.keep.long().tolist() == keep
    factors = [[float(m) for m in row] for row in keep]
    if config.rollout_is is None:
        assert result.weights is None
    else:
        bounds = weight_bounds(config.rollout_is_threshold)
        weights = slow_weights(case, config.rollout_is, bounds, config.rollout_is_batch_normalize)
        assert_close(result.weights, weights)
        factors = [[w * m for w, m in zip(*rows, strict=True)] for rows in zip(weights, keep, strict=True)]
    assert_close(token_factors(result), factors)
    gone = count(case.mask.tolist()) - sum(factor > 0 for row in factors for factor in row)
    assert result.sums["mismatch/masked_share"].item() == gone


def whole_batch(config: RolloutCorrectionConfig) -> bool:
    return config.m2po_threshold is not None or (config.rollout_is is not None and config.rollout_is_batch_normalize)


@few
@given(settings, st.integers(1, 3), st.randoms())
def test_padding_and_the_order_of_rows_do_not_matter(setting, width, shuffle) -> None:
    case, config = setting
    plain = run(config, case)
    padded = run(config, case.padded(width))
    torch.testing.assert_close(token_factors(padded)[:, :-width], token_factors(plain), rtol=1e-12, atol=1e-12)
    assert not token_factors(padded)[:, -width:].any()
    order = shuffle.sample(range(len(case.mask)), len(case.mask))
    torch.testing.assert_close(token_factors(run(config, case.rows(order))), token_factors(plain)[order], rtol=1e-12, atol=1e-12)


@few
@given(settings)
def test_sums_over_parts_are_the_sums_of_the_whole_where_no_rule_needs_the_batch(setting) -> None:
    case, config = setting
    if whole_batch(config):
        return
    whole, first, rest = (run(config, part) for part in (case, case.rows([0]), case.rows(list(range(1, len(case.mask))))))
    assert whole.sums.keys() == first.sums.keys() == rest.sums.keys()
    for name, value in whole.sums.items():
        assert (first.sums[name] + rest.sums[name]).item() == pytest.approx(value.item(), rel=1e-12)


def test_in_parts_batch_normalisation_and_m2po_would_be_others() -> None:
    """Why they are refused where the batch is not at hand."""
    log_ratio = torch.tensor([[0.1], [0.9]], dtype=torch.float64)
    mask, advantages = torch.ones(2, 1), torch.ones(2, 1)
    for config in (
        RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True, rollout_is_threshold=9.0),
        RolloutCorrectionConfig(m2po_threshold=0.5),
    ):
        whole = token_factors(correct(config, log_ratio, mask, advantages))
        parts = torch.cat([token_factors(correct(config, log_ratio[[i]], mask[[i]], advantages[[i]])) for i in (0, 1)])
        assert (whole - parts).abs().max() > 0.1


def test_counts_of_a_small_batch() -> None:
    ratios = torch.tensor([[3.0, 1.0, 0.25], [1.0, 1.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs=["token_k1"], rollout_rs_threshold=["0.5_5.0"])
    result = correct(config, ratios.log(), mask)
    sums = {name: value.item() for name, value in result.sums.items()}
    assert sums == pytest.approx(
        {
            "correction/rejected/token_k1": 1.0,
            "correction/outside_share": 1.0,
            "correction/weight_mean": 2.0 + 1.0 + 0.25 + 1.0 + 1.0,
            "mismatch/masked_share": 1.0,
        }
    )
    band = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.5_2.0")
    assert correct(band, ratios.log(), mask).sums["mismatch/masked_share"].item() == 2.0


def test_policies_that_agree_are_left_alone_by_everything() -> None:
    zero, mask = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([[1, 1, 0], [1, 0, 0]])
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs=["token_k1,seq_max_k3"], rollout_rs_threshold=["0.999_1.001,0.001"], m2po_threshold=0.04
    )
    assert token_factors(correct(config, zero, mask, torch.ones(2, 3))).tolist() == mask.double().tolist()
    assert math.isclose(correct(config, zero, mask, torch.ones(2, 3)).sums["correction/weight_mean"].item(), 3.0)
