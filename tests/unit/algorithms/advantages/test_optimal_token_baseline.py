"""Optimal token baseline by hand, and on tokens that leave no choice."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlhub.algorithms.advantages import optimal_token_baseline as module
from rlhub.algorithms.advantages.optimal_token_baseline import OptimalTokenBaselineKnobs, optimal_token_baseline
from rlhub.algorithms.inputs import AdvantageInputs


def batch(mask: list[list[int]], rewards: list[float], pi: float | torch.Tensor = 0.5) -> AdvantageInputs:
    """One group over two tokens of probability pi and 1 - pi; each row's reward on its last model token."""
    keep = torch.tensor(mask)
    scores = torch.zeros(keep.shape, dtype=torch.float64)
    for row, reward in enumerate(rewards):
        scores[row, int(keep[row].nonzero().max())] = reward
    chosen = torch.zeros(keep.shape, dtype=torch.float64) + pi
    return AdvantageInputs(
        token_level_rewards=scores,
        response_mask=keep,
        group=torch.zeros(len(mask)).long(),
        old_log_probs=chosen.log(),
        sum_pi_squared=chosen.square() + (1 - chosen).square(),
    )


def close(inputs: AdvantageInputs, expected: list[list[float]]) -> bool:
    advantages = optimal_token_baseline(inputs, OptimalTokenBaselineKnobs()).advantages
    return torch.allclose(advantages, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_weights_accumulate_and_the_longest_rows_tail_has_no_baseline() -> None:
    """w = (1 - pi)^2 * 2; the surer row counts less in B."""
    pi = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.9, 0.9]], dtype=torch.float64)
    inputs = batch([[1, 1, 1], [1, 1, 0]], [1.0, 0.0], pi)
    baseline = 0.5 / (0.5 + 0.02)  # the same at both shared tokens: W grows in proportion
    assert close(inputs, [[1 - baseline, 1 - baseline, 1.0], [-baseline, -baseline, 0.0]])
    assert not close(inputs, [[0.5, 0.5, 1.0], [-0.5, -0.5, 0.0]])


def test_rows_meet_at_what_the_model_wrote() -> None:
    """Tool output between turns moves nothing."""
    plain = optimal_token_baseline(batch([[1, 1, 1], [1, 1, 0]], [1.0, -1.0], 0.3), OptimalTokenBaselineKnobs()).advantages
    gaps = batch([[1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 1, 0]], [1.0, -1.0], 0.3)
    spread = optimal_token_baseline(gaps, OptimalTokenBaselineKnobs()).advantages
    torch.testing.assert_close(spread[gaps.response_mask.bool()], plain[torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()])


def test_a_token_without_a_choice_has_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pi is 1 to rounding, its squared norm is rounding of either sign: it is 0, and there is no baseline yet."""
    pi = torch.tensor([[1.0, 0.5], [1.0, 0.5]], dtype=torch.float64)
    inputs = batch([[1, 1], [1, 1]], [1.0, 0.0], pi)
    noise = torch.tensor([[3e-16, 0.0], [-2.9e-16, 0.0]], dtype=torch.float64)
    noisy = dataclasses.replace(inputs, sum_pi_squared=inputs.sum_pi_squared + noise)
    for case in (inputs, noisy):
        assert close(case, [[1.0, 0.5], [0.0, -0.5]])
    monkeypatch.setattr(module, "NOISE_EPS", 0)  # the control
    assert not close(noisy, [[1.0, 0.5], [0.0, -0.5]])
