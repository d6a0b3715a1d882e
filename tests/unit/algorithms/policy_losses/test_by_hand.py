"""What each loss is for, in numbers worked out by hand: where it stops learning, and how strongly it learns elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhub.algorithms.inputs import PolicyLossInputs
from rlhub.algorithms.registry import POLICY_LOSSES


def gradients(name: str, log_ratios: list[float], advantages: list[float], old: float = -1.0, **knobs: Any) -> list[float]:
    """d loss / d log pi of the tokens of one row, per unit of advantage magnitude; old and rollout policy are the same."""
    knobs_class = POLICY_LOSSES.knobs_class(name)
    start = torch.full((1, len(log_ratios)), old, dtype=torch.float64)
    new = (start + torch.tensor([log_ratios], dtype=torch.float64)).requires_grad_()
    selected = knobs.pop("selected", [0] * len(log_ratios))
    inputs = PolicyLossInputs(
        log_probs=new,
        old_log_probs=start,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        response_mask=torch.ones(1, len(log_ratios)),
        rollout_log_probs=start,
        selected=torch.tensor([selected], dtype=torch.uint8),
    )
    total = POLICY_LOSSES.get(name)(inputs, knobs_class(**knobs) if knobs_class else None).loss.sum()
    return torch.autograd.grad(total, new)[0][0].tolist()


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES.names() if name != "geo_mean"])
def test_on_policy_each_loss_is_the_policy_gradient(name: str) -> None:
    assert gradients(name, [0.0, 0.0, 0.0], [2.0, -1.0, 0.0]) == pytest.approx([-2.0, 1.0, 0.0])


def test_the_clip_stops_a_token_that_has_moved_far_enough_and_never_one_that_must_come_back() -> None:
    below, inside, above = math.log(0.7), 0.1, math.log(1.3)
    assert gradients("vanilla", [below, inside, above], [2.0] * 3) == pytest.approx([-1.4, -2.0 * math.exp(0.1), 0.0])
    assert gradients("vanilla", [below, inside, above], [-2.0] * 3) == pytest.approx([0.0, 2.0 * math.exp(0.1), 2.6])
    assert gradients("vanilla", [1.0, 1.2], [-2.0] * 2) == pytest.approx([2.0 * math.e, 0.0])  # dual clip: e^1.2 > 3
    assert gradients("vanilla", [0.3], [2.0], clip_ratio_high=0.5) == pytest.approx([-2.0 * math.exp(0.3)])


def test_on_policy_the_geometric_mean_spreads_the_rows_gradient_evenly() -> None:
    assert gradients("geo_mean", [0.0, 0.0], [2.0, -1.0]) == pytest.approx([-0.5, -0.5])
    assert gradients("geo_mean", [0.0] * 3, [2.0] * 3) == pytest.approx([-2.0] * 3)


def test_a_sequence_ratio_is_clipped_as_one() -> None:
    """The mean log-ratio of 0.001 is beyond 4e-4: no token of the row learns more, though one of them fell behind."""
    assert gradients("gspo", [0.006, -0.004], [1.0, 1.0]) == [0.0, 0.0]
    assert gradients("gspo", [0.006, -0.004], [-1.0, -1.0]) == pytest.approx([math.exp(0.001)] * 2)
    assert gradients("gspo", [-0.004, 0.002], [-1.0, -1.0]) == [0.0, 0.0]
    assert gradients("gspo", [0.0002, 0.0002], [1.0, 1.0]) == pytest.approx([-math.exp(0.0002)] * 2)
    assert gradients("gspo", [0.006, -0.004], [1.0, 1.0], clip_high=0.2) == pytest.approx([-math.exp(0.001)] * 2)


def test_the_section_bounds_of_ppo_do_not_reach_sequence_ratios() -> None:
    for name in ("gspo", "geo_mean", "cispo"):
        fields = set(POLICY_LOSSES.knobs_class(name).__dataclass_fields__)
        assert fields == {"clip_low", "clip_high"}


def test_a_soft_gate_fades_and_fades_faster_for_negative_advantages() -> None:
    near, far = (abs(gradients("sapo", [math.log(ratio)], [1.0])[0]) for ratio in (1.5, 4.0))
    assert near == pytest.approx(1.5 / math.cosh(0.25) ** 2)
    assert far == pytest.approx(4.0 / math.cosh(1.5) ** 2)
    negative = gradients("sapo", [math.log(4.0)], [-1.0])[0]
    assert negative == pytest.approx(4.0 / math.cosh(1.05 * 1.5) ** 2) and negative < far


def test_clipped_weights_keep_every_token_learning() -> None:
    assert gradients("cispo", [1.0, -1.0, 0.1], [1.0] * 3) == pytest.approx([-1.2, -math.exp(-1), -math.exp(0.1)])
    assert gradients("cispo", [-1.0], [1.0], clip_low=0.2) == pytest.approx([-0.8])


def test_geometric_clips_act_before_the_mean() -> None:
    """One of two tokens is at the bound 0.4: it has no gradient, and it counts 0.4 in the ratio of both."""
    ratio = math.exp((0.4 + 0.1) / 2)
    assert gradients("geo_mean", [1.0, 0.1], [1.0, 1.0]) == pytest.approx([0.0, -ratio])
    assert gradients("geo_mean", [-1.0, 0.1], [-1.0, -1.0]) == pytest.approx([0.0, math.exp((-0.4 + 0.1) / 2)])
    assert gradients("geo_mean", [-1.0, 0.1], [1.0, 1.0]) == pytest.approx([-math.exp(-0.45)] * 2)


def test_divergence_and_not_the_ratio_decides_what_is_dropped() -> None:
    """A rare token may double its probability (2e-4 in total variation); a frequent one may not gain 0.2."""
    rare, frequent = math.log(1e-4), math.log(0.5)
    for name in ("dppo_tv", "dppo_kl"):
        assert gradients(name, [math.log(2.0)], [1.0], old=rare) == pytest.approx([-2.0])
        assert gradients(name, [math.log(1.4)], [1.0], old=frequent) == [0.0]
        assert gradients(name, [math.log(1.4)], [-1.0], old=frequent) == pytest.approx([1.4])  # back towards the anchor
        assert gradients(name, [math.log(0.6)], [-1.0], old=frequent) == [0.0]
    assert gradients("dppo_tv", [math.log(30.0)], [1.0], old=rare) == pytest.approx([-20.0])


def test_the_anchor_of_a_divergence_is_the_rollout_policy() -> None:
    new = torch.full((1, 1), math.log(0.5), requires_grad=True)
    inputs = PolicyLossInputs(
        log_probs=new,
        old_log_probs=new.detach(),
        advantages=torch.ones(1, 1),
        response_mask=torch.ones(1, 1),
        rollout_log_probs=torch.full((1, 1), math.log(0.3)),
    )
    for name in ("dppo_tv", "dppo_kl"):
        outputs = POLICY_LOSSES.get(name)(inputs, POLICY_LOSSES.knobs_class(name)())
        assert outputs.sums["pg_clipfrac"] == 1 and outputs.loss.item() == 0
        assert outputs.sums["ppo_kl"] == 0  # still measured against the old policy


def test_selected_tokens_leave_the_update_or_pay_for_moving() -> None:
    move = [0.1, 0.1, -0.1]
    assert gradients("clip_cov", move, [1.0] * 3, selected=[0, 1, 0]) == pytest.approx([-math.exp(0.1), 0.0, -math.exp(-0.1)])
    free, held, held_below = gradients("kl_cov", move, [1.0] * 3, selected=[0, 1, 1])
    assert (free, held, held_below) == pytest.approx((-math.exp(0.1), 1 - math.exp(0.1), -1 - math.exp(-0.1)))


def test_a_clipped_log_probability_has_no_importance_weight_and_drifts_back() -> None:
    plain = {"drift_coef": 0.0}
    assert gradients("cpgd", [0.1, -1.0, 0.2], [1.0] * 3, **plain) == [-1.0, -1.0, 0.0]  # log 1.2 < 0.2
    assert gradients("cpgd", [-0.1, 1.0, -0.3], [-1.0] * 3, **plain) == [1.0, 1.0, 0.0]  # log 0.8 > -0.3
    assert gradients("cpgd", [3.0, -3.0], [0.0, 0.0], drift_coef=0.1) == pytest.approx([0.1 * 2.0, 0.1 * (math.exp(-3) - 1)])
    assert gradients("cpgd", [-30.0], [-1.0], clip_ratio=1.0, **plain) == [1.0]  # eps 1: probability 0 is allowed


def test_weights_of_another_dtype_leave_the_losss_dtype_alone() -> None:
    for name in POLICY_LOSSES.names():
        knobs_class, ones = POLICY_LOSSES.knobs_class(name), torch.ones(2, 3)
        inputs = PolicyLossInputs(
            log_probs=-ones,
            old_log_probs=-ones,
            advantages=ones,
            response_mask=ones.long(),
            weights=ones.double(),
            rollout_log_probs=-ones,
            selected=torch.zeros(2, 3, dtype=torch.uint8),
        )
        assert POLICY_LOSSES.get(name)(inputs, knobs_class() if knobs_class else None).loss.dtype == torch.float32, name


def test_a_dual_clip_that_would_bound_every_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_ratio_c must be above 1"):
        POLICY_LOSSES.knobs_class("vanilla")(clip_ratio_c=1.0)


def test_temperatures_that_do_not_gate_are_refused() -> None:
    with pytest.raises(ValueError, match="tau_pos and tau_neg must be positive, got 0.0 and 1.05"):
        POLICY_LOSSES.knobs_class("sapo")(tau_pos=0.0)
