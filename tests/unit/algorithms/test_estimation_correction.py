"""The correction and the mismatch of a whole batch: which columns and metrics come of them, and what they leave alone."""

from __future__ import annotations

import math

import pytest
import torch

from rlhub.algorithms.estimation import ColumnOutputs, rollout_correction
from rlhub.algorithms.mismatch import measure_mismatch
from rlhub.algorithms.statistics import HERE
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig

OLD = [[-1.0, -2.0, -3.0], [-1.0, -1.5, 0.0]]
RATIO = [[3.0, 1.0, 0.25], [1.0, 0.9, 50.0]]
MASK = [[1, 1, 1], [1, 1, 0]]


def columns_with(**columns: torch.Tensor) -> dict[str, torch.Tensor]:
    """pi_old / mu is RATIO; the last token of row 1 is masked."""
    old = torch.tensor(OLD)
    return {
        "old_log_probs": old,
        "rollout_log_probs": old - torch.tensor(RATIO).log(),
        "response_mask": torch.tensor(MASK),
        "learn_mask": torch.tensor(MASK),
        "advantages": torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]),
        **columns,
    }


def corrected(**changes: object) -> ColumnOutputs:
    return rollout_correction(columns_with(), HERE, RolloutCorrectionConfig(**changes))  # type: ignore[arg-type]


def test_weights_become_a_column_and_rejected_tokens_leave_the_loss() -> None:
    found = corrected(rollout_is="token", rollout_rs=["token_k1"], rollout_rs_threshold=["0.2_2.0"])
    weights, mask = found.columns["importance_weights"], found.columns["loss_mask"]
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, 0.25], [1.0, 0.9, 0.0]]), rtol=1e-5, atol=0)
    assert weights.dtype == torch.float32
    assert mask.tolist() == [[1, 1, 0], [1, 1, 0]] and mask.dtype == torch.int64
    assert found.metrics == pytest.approx(
        {
            "correction/rejected/token_k1": 1 / 5,
            "correction/outside_share": 1 / 5,
            "correction/weight_mean": (2.0 + 1.0 + 0.25 + 1.0 + 0.9) / 5,
            "correction/weight_min": 0.9,
            "correction/weight_max": 2.0,
            "mismatch/masked_share": 1 / 5,
        },
        rel=1e-5,
    )


def test_batch_normalisation_tells_what_it_divided_by() -> None:
    found = corrected(rollout_is="token", rollout_is_batch_normalize=True)
    mean = (2.0 + 1.0 + 0.25 + 1.0 + 0.9) / 5
    assert found.metrics["correction/batch_norm_factor"] == pytest.approx(mean, rel=1e-5)
    assert found.metrics["correction/weight_mean"] == pytest.approx(1.0)
    assert found.columns["importance_weights"][0, 0].item() == pytest.approx(2.0 / mean, rel=1e-5)


def test_m2po_reads_the_advantages() -> None:
    found = corrected(m2po_threshold=0.04)
    # the same sign: 3.0 (A = 1) and 0.9 (A = -1); only the second's log^2 is under 0.04
    assert found.columns["loss_mask"].tolist() == [[0, 1, 1], [1, 1, 0]]
    assert found.metrics["correction/rejected/m2po"] == found.metrics["mismatch/masked_share"] == 1 / 5
    assert set(found.columns) == {"loss_mask"}


def test_a_rejected_batch_is_left_without_tokens_and_without_an_error() -> None:
    found = corrected(rollout_is="token", rollout_rs=["seq_max_k2"], rollout_rs_threshold=["1e-9"])
    assert not found.columns["loss_mask"].any() and found.metrics["mismatch/masked_share"] == 1.0
    assert "correction/weight_max" not in found.metrics


def test_nothing_configured_masks_nothing() -> None:
    found = corrected()
    assert found.metrics == {"mismatch/masked_share": 0.0}
    assert set(found.columns) == {"loss_mask"} and found.columns["loss_mask"].tolist() == MASK


def test_mismatch_has_the_extremes_of_the_weight() -> None:
    metrics = measure_mismatch(columns_with(), HERE)
    assert (metrics["mismatch/weight_min"], metrics["mismatch/weight_max"]) == pytest.approx((0.25, 3.0), rel=1e-5)
    ratios = [3.0, 1.0, 0.25, 1.0, 0.9]
    assert metrics["mismatch/weight_mean"] == pytest.approx(math.fsum(ratios) / 5, rel=1e-5)
    ess = math.fsum(ratios) ** 2 / (5 * math.fsum(r * r for r in ratios))
    assert metrics["mismatch/ess"] == pytest.approx(ess, rel=1e-5) and 0.2 < ess < 1


def test_the_mismatch_is_told_apart_by_staleness() -> None:
    """Tokens of one age make one number; tokens that nobody sampled make none; samples without a version are from the newest."""
    found = measure_mismatch(columns_with(policy_version=torch.tensor([[5, 5, 3], [3, 3, -1]])), HERE, 5)
    by_age = {name: value for name, value in found.items() if "staleness" in name}
    new, old = -math.log(3) / 2, -(math.log(0.25) + math.log(0.9)) / 3
    assert by_age == pytest.approx({"mismatch/kl/staleness_0": new, "mismatch/kl/staleness_2": old})
    assert not [name for name in measure_mismatch(columns_with(), HERE, 5) if "staleness" in name]
