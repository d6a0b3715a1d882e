"""A-3PO's proximal policy against the formula token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.correction.a3po import proximal_log_probs
from tests.unit.algorithms.cases import assert_close, catches, exact, few, seeds
from tests.unit.algorithms.correction.correction_cases import cases

settings = st.tuples(cases(), seeds, st.booleans())


def versions(case, seed: int, per_token: bool) -> torch.Tensor:
    shape = case.mask.shape if per_token else case.mask.shape[:1]
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed))


def slow(case, staleness: torch.Tensor) -> list[list[float]]:
    table = []
    for i, (pi, mu, keep) in enumerate(zip(exact(case.pi), exact(case.mu), case.mask.tolist(), strict=True)):
        row = []
        for t, (p, q, m) in enumerate(zip(pi, mu, keep, strict=True)):
            d = int(staleness[i][t] if staleness.dim() == 2 else staleness[i])
            row.append((p if d == 0 else q + (d - 1) / d * (p - q)) if m else 0.0)
        table.append(row)
    return table


def check(function, setting) -> None:
    case, seed, per_token = setting
    staleness = versions(case, seed, per_token)
    assert_close(function(case.pi, case.mu, staleness, case.mask), slow(case, staleness))


@few
@given(settings)
def test_proximal_policy(setting) -> None:
    check(proximal_log_probs, setting)


def test_broken_ones_are_caught() -> None:
    assert catches(check, lambda pi, mu, d, mask: proximal_log_probs(mu, pi, d, mask), settings)
    assert catches(check, lambda pi, mu, d, mask: proximal_log_probs(pi, mu, d + 1, mask), settings)
    assert catches(check, lambda pi, mu, d, mask: proximal_log_probs(pi, mu, d, torch.ones_like(mask)), settings)


def test_one_version_behind_is_the_rollout_policy_and_none_the_current_one() -> None:
    pi, mu = torch.tensor([[-1.0, -1.3]], requires_grad=True), torch.tensor([[-2.1, -1.1]])
    mask = torch.ones(1, 2)
    assert torch.equal(proximal_log_probs(pi, mu, torch.tensor([1]), mask), mu)
    current = proximal_log_probs(pi, mu, torch.tensor([0]), mask)
    assert torch.equal(current, pi.detach()) and not current.requires_grad
    far = proximal_log_probs(pi, mu, torch.tensor([10**6]), mask)
    torch.testing.assert_close(far, pi.detach(), rtol=0, atol=1e-5)
