"""Validation metrics: pass@k against all subsets, best, worst and majority of k against a slow bootstrap and against the exact
expectation, and the names under which they are reported."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from rlhub.trainer.ppo.validation_metrics import (
    NUM_DRAWS,
    SEED,
    ScoredSamples,
    ballots,
    correctness,
    first_of_majority,
    joined,
    pass_at_k,
    pass_metrics,
    powers_up_to,
    sample_metrics,
    validation_metrics,
)


def samples_of(scores: np.ndarray, *, valid: np.ndarray | None = None, **details: np.ndarray) -> ScoredSamples:
    """Samples whose rows are those of `scores`, (prompts, n)."""
    flat = scores.ravel().astype(np.float32)
    columns = {name: column.ravel() for name, column in details.items()}
    return ScoredSamples(
        scores=flat,
        correct=correctness(columns, flat),
        valid=np.ones(flat.shape, dtype=bool) if valid is None else valid.ravel(),
        lengths=np.full(len(flat), 3.0),
        details=columns,
    )


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
    metrics = validation_metrics(samples_of(correct), ["a", "a", "b"], 2)
    assert metrics["val/pass@1"] == pytest.approx(0.5)
    assert metrics["val/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val/a/pass@1"] == pytest.approx(0.25)
    assert metrics["val/b/pass@1"] == 1.0
    assert pass_metrics("x", correct, np.ones_like(correct)) == {"x/pass@1": pytest.approx(0.5), "x/pass@2": pytest.approx(2 / 3)}


def test_the_scorers_own_accuracy_wins_over_the_score() -> None:
    scores = np.array([0.9, -0.1, 0.8])
    assert correctness({}, scores).tolist() == [True, False, True]
    assert correctness({"acc": np.array([0, 1, None], dtype=object)}, scores).tolist() == [False, True, True]


# Samples without a valid score


def slow_pass_at_k(correct: list[list[bool]], valid: list[list[bool]], k: int) -> float | None:
    """Over all subsets of each prompt's valid samples; None if no prompt has so many."""
    shares = []
    for row, scored in zip(correct, valid, strict=True):
        subsets = list(combinations([c for c, v in zip(row, scored, strict=True) if v], k))
        if subsets:
            shares.append(sum(map(any, subsets)) / len(subsets))
    return sum(shares) / len(shares) if shares else None


@pytest.mark.parametrize("seed", range(20))
def test_pass_at_k_counts_valid_samples_alone(seed: int) -> None:
    """A prompt with fewer than k of them says nothing of k tries, and is left out of pass@k."""
    random = np.random.default_rng(seed)
    shape = (int(random.integers(1, 6)), int(random.integers(1, 6)))
    correct, valid = random.random(shape) < 0.4, random.random(shape) < random.choice([0.1, 0.6, 1.0])
    metrics = pass_metrics("x", correct, valid)
    for k in powers_up_to(shape[1]):
        expected = slow_pass_at_k(correct.tolist(), valid.tolist(), k)
        assert metrics.get(f"x/pass@{k}") == (None if expected is None else pytest.approx(expected)), k


def test_invalid_samples_move_no_mean_and_a_failed_score_would_show() -> None:
    correct, valid = np.array([[True, False], [False, True]]), np.array([[True, False], [False, True]])
    scores = np.array([[3e38, 7.0], [7.0, 3e38]])
    samples = samples_of(scores, valid=valid, acc=correct.astype(float))
    metrics = validation_metrics(samples, ["a", "b"], 2)
    assert metrics["val/pass@1"] == metrics["val/a/pass@1"] == metrics["val/b/pass@1"] == 1.0
    assert metrics["val/reward/mean"] == pytest.approx(3e38) and "val/pass@2" not in metrics
    assert metrics["val-aux/a/reward/mean@2"] == metrics["val-aux/b/reward/mean@2"] == pytest.approx(3e38)
    assert not any("best@2" in name for name in metrics), "no prompt has two valid samples"
    nothing = validation_metrics(samples_of(scores, valid=np.zeros((2, 2), dtype=bool)), ["a", "a"], 2)
    assert set(nothing) == {"val/response_length/mean", "val/num_prompts", "val/reward/failed_share"}


# Best, worst and majority of k


def slow_majority(votes: list[int], values: list[float]) -> float:
    """The value of the first vote for the most frequent; of equally frequent ones the one that was voted for first."""
    counts = Counter(votes)  # in the order of the first votes
    return values[votes.index(max(counts, key=lambda vote: counts[vote]))]


KINDS = {
    "best": lambda votes, values: max(values),
    "worst": lambda votes, values: min(values),
    "maj": slow_majority,
}


def slow_bootstrap(values: list[list[float]], votes: list[list[int]], k: int, kind: str) -> tuple[float, float]:
    """Mean and standard deviation over the draws, averaged over the prompts; the same draws, in plain loops."""
    means, deviations = [], []
    generator = np.random.default_rng(SEED)
    n = len(values[0])
    for own, cast in zip(values, votes, strict=True):
        for size in powers_up_to(n)[1:]:
            draws = generator.integers(n, size=(NUM_DRAWS, size)).tolist()
            if size == k:
                drawn = [KINDS[kind]([cast[i] for i in draw], [own[i] for i in draw]) for draw in draws]
                mean = math.fsum(drawn) / NUM_DRAWS
                means.append(mean)
                deviations.append(math.sqrt(math.fsum((one - mean) ** 2 for one in drawn) / NUM_DRAWS))
    return math.fsum(means) / len(means), math.fsum(deviations) / len(deviations)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_the_bootstrap_is_that_of_plain_loops(n: int) -> None:
    random = np.random.default_rng(n)
    values, votes = random.normal(size=(3, n)), random.integers(3, size=(3, n))
    metrics = sample_metrics(values, np.ones((3, n), dtype=bool), votes)
    for k in powers_up_to(n)[1:]:
        for kind in KINDS:
            mean, deviation = slow_bootstrap(values.tolist(), votes.tolist(), k, kind)
            assert metrics[f"{kind}@{k}/mean"] == pytest.approx(mean), (kind, k)
            assert metrics[f"{kind}@{k}/std"] == pytest.approx(deviation), (kind, k)
    assert metrics[f"mean@{n}"] == pytest.approx(values.mean())
    assert metrics[f"std@{n}"] == pytest.approx(np.mean([row.std() for row in values]))
    sizes = {name.partition("/")[0].partition("@")[2] for name in metrics}
    assert sizes == {str(k) for k in powers_up_to(n)[1:]}


def exact_best(values: np.ndarray, k: int) -> tuple[float, float]:
    """The largest of k independent draws is the i-th smallest value with chance (i/n)^k - ((i-1)/n)^k."""
    ordered, n = np.sort(values), len(values)
    chances = np.diff((np.arange(n + 1) / n) ** k)
    mean = float(chances @ ordered)
    return mean, math.sqrt(float(chances @ (ordered - mean) ** 2))


@pytest.mark.parametrize("k", [2, 4, 8, 16])
def test_the_bootstrap_comes_close_to_the_exact_expectation_of_the_best(k: int) -> None:
    """Within five standard errors of the mean over all prompts' draws; the best of all samples would not be."""
    values = np.random.default_rng(k).normal(size=(40, 16))
    metrics = sample_metrics(values, np.ones(values.shape, dtype=bool), None)
    exact = [exact_best(row, k) for row in values]
    mean, deviation = (math.fsum(one[i] for one in exact) / len(exact) for i in (0, 1))
    error = math.sqrt(math.fsum(one[1] ** 2 for one in exact) / NUM_DRAWS) / len(exact)
    assert abs(metrics[f"best@{k}/mean"] - mean) < 5 * error
    assert metrics[f"best@{k}/std"] == pytest.approx(deviation, rel=0.05)
    assert abs(values.max(1).mean() - mean) > 20 * error, "the control"


@pytest.mark.parametrize("kind", KINDS)
def test_all_draws_of_a_few_samples(kind: str) -> None:
    """Against every one of the 4^4 draws, which are equally likely."""
    values, votes = [0.0, 1.0, 0.25, 0.5], [1, 0, 1, 2]
    drawn = [KINDS[kind]([votes[i] for i in draw], [values[i] for i in draw]) for draw in product(range(4), repeat=4)]
    metrics = sample_metrics(np.array([values]), np.ones((1, 4), dtype=bool), np.array([votes]))
    assert metrics[f"{kind}@4/mean"] == pytest.approx(np.mean(drawn), abs=5 * np.std(drawn) / math.sqrt(NUM_DRAWS))


def test_the_majority_and_who_wins_a_draw() -> None:
    votes = np.array([[3, 1, 1], [0, 1, 2], [2, 2, 0], [1, 0, 1], [0, 0, 0]])
    assert first_of_majority(votes).tolist() == [1, 0, 0, 0, 0]
    assert ballots(np.array([["7", None], ["8", "7"]], dtype=object)).tolist() == [[0, 1], [2, 0]]


def test_a_prompt_that_lacks_k_valid_samples_says_nothing_of_k() -> None:
    values = np.array([[1.0, 2.0, 3.0, 4.0], [9.0, 9.0, 7.0, 7.0], [5.0, 5.0, 5.0, 5.0]])
    valid = np.array([[True] * 4, [False, False, True, True], [False] * 4])
    metrics = sample_metrics(values, valid, None)
    assert metrics["mean@4"] == pytest.approx((2.5 + 7) / 2)
    assert metrics["best@2/mean"] == pytest.approx((exact_best(values[0], 2)[0] + 7) / 2, abs=0.1)
    assert metrics["best@4/mean"] == pytest.approx(exact_best(values[0], 4)[0], abs=0.2)
    assert sample_metrics(values, np.zeros_like(valid), None) == {}


def names(metrics: dict[str, float], section: str) -> set[str]:
    return {name.removeprefix(f"{section}/") for name in metrics if name.startswith(f"{section}/")}


def test_core_has_the_main_variable_at_n_and_aux_the_rest() -> None:
    """With a number of samples that is no power of two, and a data source with slashes in its name."""
    random = np.random.default_rng(0)
    details = {"acc": random.random((2, 6)) < 0.5, "pred": np.array([["1"] * 6, list("112233")], dtype=object)}
    metrics = validation_metrics(samples_of(random.random((2, 6)), **details), ["a/b", "a/b"], 6)
    pairs = [f"{kind}@{k}/{what}" for kind in ("best", "worst", "maj") for k in (2, 4, 6) for what in ("mean", "std")]
    core = {"mean@6", "best@6/mean", "best@6/std", "maj@6/mean", "maj@6/std"}
    every = {"mean@6", "std@6", *pairs}
    assert names(metrics, "val-core") == {f"a/b/acc/{name}" for name in core}
    assert names(metrics, "val-aux") == {f"a/b/acc/{name}" for name in every - core} | {f"a/b/reward/{name}" for name in every}


def test_one_greedy_sample_has_its_mean_alone() -> None:
    metrics = validation_metrics(samples_of(np.array([[0.5], [1.0]])), ["x", "x"], 1)
    assert names(metrics, "val-core") == {"x/reward/mean@1"} and metrics["val-core/x/reward/mean@1"] == 0.75
    assert names(metrics, "val-aux") == set()


def test_the_majority_is_that_of_a_source_whose_reward_function_returns_predictions() -> None:
    predictions = np.array([["7", "7"], [None, None]], dtype=object)
    metrics = validation_metrics(samples_of(np.array([[1.0, 1.0], [0.0, 0.0]]), pred=predictions), ["a", "b"], 2)
    assert metrics["val-core/a/reward/maj@2/mean"] == 1.0
    assert "val-core/b/reward/best@2/mean" in metrics and "val-core/b/reward/maj@2/mean" not in metrics


def test_a_number_that_some_rows_lack_counts_in_those_that_have_it() -> None:
    bonus = np.array([[0.5, None], [None, None]], dtype=object)
    metrics = validation_metrics(samples_of(np.zeros((2, 2)), bonus=bonus, note=np.full((2, 2), "x")), ["a", "b"], 2)
    assert metrics["val-aux/a/bonus/mean@2"] == 0.5
    assert not any("note" in name or name.startswith("val-aux/b/bonus") for name in metrics)


def test_parts_of_several_batches_are_joined() -> None:
    one, other = samples_of(np.ones((1, 2)), acc=np.ones((1, 2))), samples_of(np.zeros((1, 2)))
    one.failures, other.failures = {"reward/num_failed": 1.0, "reward/mean": 9.0}, {"reward/num_failed": 2.0}
    both = joined([one, other])
    assert both.scores.tolist() == [1, 1, 0, 0] and both.details["acc"].tolist() == [1, 1, None, None]
    assert both.failures == {"reward/num_failed": 3.0}
    metrics = validation_metrics(both, ["a", "b"], 2)
    assert (metrics["val/reward/num_failed"], metrics["val/reward/failed_share"]) == (3.0, 0.75)


def test_the_same_samples_give_the_same_metrics() -> None:
    samples = samples_of(np.random.default_rng(3).normal(size=(4, 8)))
    assert validation_metrics(samples, ["a"] * 4, 8) == validation_metrics(samples, ["a"] * 4, 8)


def test_sources_may_have_other_numbers_of_samples() -> None:
    """Each is what it is alone, and over all each prompt counts once, by its own samples."""
    many, few = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]), np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    parts = [samples_of(many), samples_of(few)]
    metrics = validation_metrics(joined(parts), ["a", "a", "b", "b", "b"], [4, 4, 2, 2, 2])
    alone = validation_metrics(parts[0], ["a", "a"], 4) | validation_metrics(parts[1], ["b"] * 3, 2)
    own = {name: value for name, value in alone.items() if "/a/" in name or "/b/" in name}
    assert {name: metrics[name] for name in own} == own and "val-core/b/reward/mean@2" in own
    assert metrics["val/pass@1"] == pytest.approx((0.5 + 0.25 + 1 + 0.5 + 0) / 5)
    assert metrics["val/pass@2"] == pytest.approx((5 / 6 + 0.5 + 1 + 1 + 0) / 5)
    assert metrics["val/pass@4"] == 1.0, "only prompts with four samples say anything of four tries"
    assert metrics["val/num_prompts"] == 5.0 and metrics["val/reward/mean"] == pytest.approx(6 / 14)
