"""Mismatch metrics against loops over the model tokens; sums over parts are the sums of the whole."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.mismatch import (
    OLDEST_BUCKET,
    extreme_metrics,
    mismatch_metrics,
    mismatch_sums,
    staleness_metrics,
    staleness_sums,
    weight_extremes,
)
from tests.unit.algorithms.cases import catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor


@dataclasses.dataclass(slots=True)
class Pair:
    pi: torch.Tensor
    mu: torch.Tensor
    mask: torch.Tensor


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    mask, seed, dtype = draw(masks()), draw(seeds), draw(dtypes)
    keep = torch.tensor(mask)
    mu = tensor(numbers(seed, mask, scale=3.0), dtype) - 3
    pi = mu + tensor(numbers(seed + 1, mask, scale=draw(st.sampled_from([0.0, 0.01, 1.0, 30.0]))), dtype)
    return Pair(garbage(pi, keep), garbage(mu, keep), keep)


def slow(pair: Pair) -> dict[str, float]:
    rows = zip(exact(pair.pi), exact(pair.mu), pair.mask.tolist(), strict=True)
    tokens = [(p, q) for row in rows for p, q, m in zip(*row, strict=True) if m]
    n = max(len(tokens), 1)
    ratios = [max(-20.0, min(20.0, p - q)) for p, q in tokens]
    weights = [math.exp(x) for x in ratios]
    trainer = math.exp(min(20.0, -math.fsum(p for p, _ in tokens) / n))
    rollout = math.exp(min(20.0, -math.fsum(q for _, q in tokens) / n))
    return {
        "mismatch/kl": math.fsum(q - p for p, q in tokens) / n,
        "mismatch/k3": math.fsum(math.expm1(x) - x for x in ratios) / n,
        "mismatch/abs_diff": math.fsum(map(abs, ratios)) / n,
        "mismatch/trainer_ppl": trainer,
        "mismatch/rollout_ppl": rollout,
        "mismatch/ppl_diff": trainer - rollout,
        "mismatch/weight_mean": math.fsum(weights) / n,
        "mismatch/ess": math.fsum(weights) ** 2 / (n * math.fsum(w * w for w in weights)) if tokens else 0.0,
    }


def of_two_parts(pi: torch.Tensor, mu: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Metrics from the sums of the first row's part and of the others'."""
    first, rest = mismatch_sums(pi[:1], mu[:1], mask[:1]), mismatch_sums(pi[1:], mu[1:], mask[1:])
    return mismatch_metrics({name: float(first[name] + rest[name]) for name in first})


def check(metrics, pair: Pair) -> None:
    got, expected = metrics(pair.pi, pair.mu, pair.mask), slow(pair)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@few
@given(pairs())
def test_metrics(pair) -> None:
    check(of_two_parts, pair)


def test_swapped_policies_and_a_missing_mask_are_caught() -> None:
    assert catches(check, lambda pi, mu, mask: of_two_parts(mu, pi, mask), pairs())
    assert catches(check, lambda pi, mu, mask: of_two_parts(pi, mu, torch.ones_like(mask)), pairs())


def test_equal_policies_agree_exactly_and_no_gradient_is_kept() -> None:
    pi = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    sums = mismatch_sums(pi, pi.detach(), torch.ones(1, 2))
    assert not any(value.requires_grad for value in sums.values())
    metrics = mismatch_metrics({name: float(value) for name, value in sums.items()})
    assert (metrics["mismatch/kl"], metrics["mismatch/k3"], metrics["mismatch/ess"]) == (0.0, 0.0, 1.0)
    assert metrics["mismatch/trainer_ppl"] == pytest.approx(math.exp(1.5))


# Extremes


def slow_extremes(pair: Pair) -> dict[str, float]:
    rows = zip(exact(pair.pi), exact(pair.mu), pair.mask.tolist(), strict=True)
    weights = [math.exp(max(-20.0, min(20.0, p - q))) for row in rows for p, q, m in zip(*row, strict=True) if m]
    return {"mismatch/weight_min": min(weights), "mismatch/weight_max": max(weights)} if weights else {}


def extremes_of_two_parts(pi: torch.Tensor, mu: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """As over micro-batches and ranks: the maximum of the parts' pairs."""
    first, rest = weight_extremes(pi[:1], mu[:1], mask[:1]), weight_extremes(pi[1:], mu[1:], mask[1:]) if len(pi) > 1 else None
    return extreme_metrics(first if rest is None else torch.maximum(first, rest))


def check_extremes(metrics, pair: Pair) -> None:
    got, expected = metrics(pair.pi, pair.mu, pair.mask), slow_extremes(pair)
    assert got == pytest.approx(expected, rel=1e-12)


@few
@given(pairs())
def test_extremes(pair) -> None:
    check_extremes(extremes_of_two_parts, pair)


def test_extremes_that_are_summed_swapped_or_unmasked_are_caught() -> None:
    def summed(pi, mu, mask):
        return extreme_metrics(sum(weight_extremes(pi[[i]], mu[[i]], mask[[i]]) for i in range(len(pi))))

    assert catches(check_extremes, summed, pairs())
    assert catches(check_extremes, lambda pi, mu, mask: extremes_of_two_parts(mu, pi, mask), pairs())
    assert catches(check_extremes, lambda pi, mu, mask: extremes_of_two_parts(pi, mu, torch.ones_like(mask)), pairs())


# By staleness


def ages_of(pair: Pair) -> list[list[int]]:
    """Some are below 0 (tokens that nobody sampled, or of a version to come) and some beyond the last bucket."""
    return [[(7 * row + 3 * place) % 13 - 1 for place in range(pair.mask.shape[1])] for row in range(len(pair.mask))]


def slow_by_staleness(pair: Pair) -> dict[str, float]:
    found: dict[int, list[float]] = {}
    rows = zip(exact(pair.pi), exact(pair.mu), pair.mask.tolist(), ages_of(pair), strict=True)
    for p, q, m, age in [token for row in rows for token in zip(*row, strict=True)]:
        if m:
            found.setdefault(min(max(age, 0), OLDEST_BUCKET), []).append(q - p)
    return {f"mismatch/kl/staleness_{age}": math.fsum(values) / len(values) for age, values in found.items()}


def by_staleness(pi: torch.Tensor, mu: torch.Tensor, mask: torch.Tensor, ages: torch.Tensor) -> dict[str, float]:
    """From sums over micro-batches."""
    parts = [staleness_sums(pi[[i]], mu[[i]], mask[[i]], ages[[i]]) for i in range(len(pi))]
    return staleness_metrics({name: float(sum(part[name] for part in parts)) for name in parts[0]})


def check_by_staleness(metrics, pair: Pair) -> None:
    got = metrics(pair.pi, pair.mu, pair.mask, torch.tensor(ages_of(pair)))
    assert got == pytest.approx(slow_by_staleness(pair), rel=1e-9, abs=1e-9)


@few
@given(pairs())
def test_mismatch_by_staleness(pair) -> None:
    check_by_staleness(by_staleness, pair)


def test_ages_that_are_unmasked_shifted_or_not_bounded_are_caught() -> None:
    broken = (
        lambda pi, mu, mask, ages: by_staleness(pi.nan_to_num(), mu.nan_to_num(), torch.ones_like(mask), ages),
        lambda pi, mu, mask, ages: by_staleness(pi, mu, mask, ages + 1),
        lambda pi, mu, mask, ages: by_staleness(mu, pi, mask, ages),
        lambda pi, mu, mask, ages: by_staleness(pi, mu, mask * (ages <= OLDEST_BUCKET), ages),
    )
    assert all(catches(check_by_staleness, metrics, pairs()) for metrics in broken)


def test_rows_of_one_age_and_all_ages_together() -> None:
    pi, mu = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True), torch.full((2, 2), -1.0)
    mask = torch.tensor([[1, 1], [1, 0]])
    sums = staleness_sums(pi, mu, mask, torch.tensor([0, 20]))
    assert not any(value.requires_grad for value in sums.values())
    assert staleness_metrics({name: float(value) for name, value in sums.items()}) == {
        "mismatch/kl/staleness_0": 0.5,
        f"mismatch/kl/staleness_{OLDEST_BUCKET}": 2.0,
    }
    whole = mismatch_sums(pi, mu, mask)
    assert sum(sums[f"mismatch_tokens_{age}"] for age in range(OLDEST_BUCKET + 1)) == whole["mismatch_tokens"]
    difference = whole["mismatch_log_mu"] - whole["mismatch_log_pi"]
    assert sum(sums[f"mismatch_kl_{age}"] for age in range(OLDEST_BUCKET + 1)) == difference


def test_effective_sample_size_and_percentiles_of_a_known_mixture() -> None:
    """A quarter of the tokens twice as likely under the trainer: ess = (1.25)^2 / 1.75, the extremes are the two weights."""
    ratio = torch.tensor([[2.0, 1.0, 1.0, 1.0]] * 25, dtype=torch.float64).log()
    mask, mu = torch.ones_like(ratio), torch.full_like(ratio, -2.0)
    metrics = mismatch_metrics({name: float(value) for name, value in mismatch_sums(mu + ratio, mu, mask).items()})
    assert metrics["mismatch/ess"] == pytest.approx(1.25**2 / 1.75)
    assert metrics["mismatch/weight_mean"] == pytest.approx(1.25)
    assert extreme_metrics(weight_extremes(mu + ratio, mu, mask)) == pytest.approx(
        {"mismatch/weight_min": 1, "mismatch/weight_max": 2}
    )
