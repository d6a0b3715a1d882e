"""pass@k against brute force over all subsets, and per-source metrics against hand counts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from rlhub.trainer.ppo.validation import correctness, pass_at_k, pass_metrics, powers_up_to, validation_metrics


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_powers_end_with_the_number_of_samples() -> None:
    assert powers_up_to(1) == [1]
    assert powers_up_to(6) == [1, 2, 4, 6]
    assert powers_up_to(8) == [1, 2, 4, 8]


def test_metrics_per_source() -> None:
    correct = np.array([[True, False], [False, False], [True, True]])
    metrics = validation_metrics(correct, correct.ravel().astype(float), np.full(6, 3.0), ["a", "a", "b"])
    assert metrics["val/pass@1"] == pytest.approx(0.5)
    assert metrics["val/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val/a/pass@1"] == pytest.approx(0.25)
    assert metrics["val/b/pass@1"] == 1.0
    assert pass_metrics("x", correct) == {"x/pass@1": pytest.approx(0.5), "x/pass@2": pytest.approx(2 / 3)}


def test_the_scorers_own_accuracy_wins_over_the_score() -> None:
    scores = np.array([0.9, -0.1, 0.8])
    assert correctness({}, scores).tolist() == [True, False, True]
    assert correctness({"acc": np.array([0, 1, None], dtype=object)}, scores).tolist() == [False, True, True]
