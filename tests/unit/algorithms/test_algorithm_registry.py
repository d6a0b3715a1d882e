"""Every registered algorithm loads, and its row says what it needs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlhub.algorithms.inputs import AdvantageInputs, PolicyLossInputs
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
def test_estimators_work_from_what_their_rows_require_and_not_from_less(name: str) -> None:
    requires, knobs_class = ADVANTAGE_ESTIMATORS.row(name).requires, ADVANTAGE_ESTIMATORS.knobs_class(name)
    knobs = knobs_class() if knobs_class else None
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2).long()
    bare = AdvantageInputs(token_level_rewards=rewards, response_mask=mask)
    needs = {
        "values": {"values": torch.zeros(2, 2)},
        "groups": {"group": torch.tensor([0, 0])},
        "old_log_probs": {"old_log_probs": torch.full((2, 2), -1.0)},
        "sum_pi_squared": {"sum_pi_squared": torch.full((2, 2), 0.5)},
        "baseline_rewards": {"baseline_rewards": torch.zeros(2)},
        "reward_components": {"reward_components": {"right": torch.tensor([1.0, 0.0], dtype=torch.float64)}},
        "reference": {"ref_log_prob": torch.tensor([[-1.0, -0.5], [-1.0, -2.0]])},
        "components_only": {},
        "gather": {},
        "episodes": {"episode": torch.arange(2), "call": torch.zeros(2).long(), "terminated": torch.ones(2).bool()},
        "next_values": {"next_values": torch.zeros(2)},
    }
    given = {field: value for need in requires for field, value in needs[need].items()}
    outputs = ADVANTAGE_ESTIMATORS.get(name)(dataclasses.replace(bare, **given), knobs)
    assert outputs.advantages.shape == outputs.returns.shape == (2, 2)
    assert outputs.advantages.dtype == torch.float32
    assert outputs.advantages[0, 1] > outputs.advantages[1, 1]
    other = ADVANTAGE_ESTIMATORS.get(name)(dataclasses.replace(bare, **given, token_level_rewards=-rewards), knobs)
    assert torch.equal(other.advantages, outputs.advantages) == ("components_only" in requires)
    if given:
        with pytest.raises(AssertionError, match="requires"):
            ADVANTAGE_ESTIMATORS.get(name)(bare, knobs)


def test_estimators_of_one_number_a_sample_say_so_and_others_do_not() -> None:
    one_number = {"grpo", "grpo_passk", "rloo", "opo", "gpg", "cpgd"}
    with_companion = {name for name in ADVANTAGE_ESTIMATORS.names() if ADVANTAGE_ESTIMATORS.companion(name, "per_sample")}
    assert with_companion == one_number
    for name in one_number:
        companion, estimator = ADVANTAGE_ESTIMATORS.companion(name, "per_sample"), ADVANTAGE_ESTIMATORS.get(name)
        assert companion.__module__ == estimator.__module__, name


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_losses_work_from_what_their_rows_require_and_not_from_less(name: str) -> None:
    """They raise the probability of good tokens and lower that of bad ones."""
    row, knobs_class = POLICY_LOSSES.row(name), POLICY_LOSSES.knobs_class(name)
    new = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    bare = PolicyLossInputs(
        log_probs=new,
        old_log_probs=new.detach(),
        advantages=torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]),
        response_mask=torch.tensor([[1, 1, 0], [1, 1, 0]]),
    )
    given = {"rollout_log_probs": new.detach()} if "rollout_log_probs" in row.requires else {}
    if "select" in row.companions:
        given["selected"] = torch.zeros(2, 3, dtype=torch.uint8)
    loss, knobs = POLICY_LOSSES.get(name), knobs_class() if knobs_class else None
    loss(dataclasses.replace(bare, **given), knobs).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.sign().tolist() == [[-1.0, -1.0, 0.0], [1.0, 1.0, 0.0]]
    if given:
        with pytest.raises(AssertionError, match="requires"):
            loss(bare, knobs)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_what_a_loss_brings_along_can_be_loaded(name: str) -> None:
    for role in POLICY_LOSSES.row(name).companions:
        assert role == "select" and callable(POLICY_LOSSES.companion(name, role))


def test_each_kl_estimator_has_a_straight_through_variant() -> None:
    names = KL_ESTIMATORS.names()
    assert {name.removesuffix("+") for name in names} | {f"{name.removesuffix('+')}+" for name in names} == set(names)
    assert {"kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3"} <= set(names)
