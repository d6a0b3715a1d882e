"""The staleness of what was taken for training: quantiles and histogram of the same counts."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhub.rollout_service.executor.statistics import OLDEST_SHARE, shares, summary


def test_shares_add_up_and_the_oldest_share_a_bar() -> None:
    histogram = Counter({0: 6, 2: 3, OLDEST_SHARE: 1, OLDEST_SHARE + 5: 2})
    assert shares(histogram) == {"share_0": 0.5, "share_2": 0.25, f"share_{OLDEST_SHARE}": 0.25}
    assert summary(histogram)["max"] == OLDEST_SHARE + 5, "which the histogram no longer tells"


def test_of_nothing_there_is_nothing() -> None:
    assert shares(Counter()) == summary(Counter()) == {}


@pytest.mark.parametrize("values", [[0] * 5, [0, 1, 1, 2, 2, 2, 3], list(range(OLDEST_SHARE + 1))])
def test_the_mean_is_that_of_the_histogram(values: list[int]) -> None:
    histogram = Counter(values)
    told = {int(name.removeprefix("share_")): share for name, share in shares(histogram).items()}
    assert sum(value * share for value, share in told.items()) == pytest.approx(summary(histogram)["mean"])
