"""Advantages, correction and selection over real gloo ranks are those of one process, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.integration import estimation_checks as checks
from tests.integration.fsdp_ranks import Ranks


@pytest.fixture(scope="module", params=(2, 4), ids=lambda world: f"world{world}")
def ranks(request: pytest.FixtureRequest):
    group = Ranks(request.param, preload="tests.integration.estimation_checks")
    yield group
    group.close()


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("estimator", ["gae", "grpo", "gdpo", "optimal_token_baseline"])
def test_columns_and_metrics_are_those_of_one_process(ranks: Ranks, estimator: str, even: bool) -> None:
    """An estimator that gathers, one on a number a sample, one on several, and one that is given the whole batch.

    Rows are dealt in another order than they were sampled; where uneven, the last rank has none.
    """
    order = np.random.default_rng(4).permutation(checks.ROWS)
    parts = np.array_split(order, ranks.world) if even else [*np.array_split(order, ranks.world - 1), order[:0]]
    whole = checks.of_the_whole(estimator)
    for rows, found in zip(parts, ranks.call(checks.of_own_rows, [part.tolist() for part in parts], estimator), strict=True):
        assert found["metrics"] == whole["metrics"]
        assert found["columns"].keys() == whole["columns"].keys()
        for name, column in found["columns"].items():
            expected = whole["columns"][name][rows]
            assert np.array_equal(column, expected[:, : column.shape[1]]) and not expected[:, column.shape[1] :].any(), name


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32", "bfloat16", "float64"])
def test_rows_of_any_number_width_and_dtype_come_together(ranks: Ranks, dtype: str) -> None:
    number = np.concatenate([np.full((rank, 1), rank) for rank in range(ranks.world)])
    expected = number * (np.arange(ranks.world) <= number)
    wanted = expected.astype(bool) if dtype == "bool" else expected
    for rows, numbers in ranks.call(checks.gathered, dtype):
        assert np.array_equal(rows, wanted) and np.array_equal(numbers, wanted[:, 0])
