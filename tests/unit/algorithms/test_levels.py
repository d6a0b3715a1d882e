"""Losses over tokens, actions and responses: every policy loss at every level against loops over units."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhub.algorithms.correction.correct import correct
from rlhub.algorithms.correction.weights import log_ratios
from rlhub.algorithms.estimation import rollout_correction, select_tokens
from rlhub.algorithms.inputs import PolicyLossInputs
from rlhub.algorithms.levels import TOKENS, Level, Units
from rlhub.algorithms.masked import Denominators, aggregate
from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.algorithms.statistics import HERE
from rlhub.config.sections.actor import ActorConfig, PolicyLossConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from tests.unit.algorithms.cases import assert_close, few
from tests.unit.algorithms.loss_cases import COLUMNS, Case, cases, inputs_of
from tests.unit.algorithms.loss_references import REFERENCES, Token

ACTION_DIM = 3
LEVELS: list[Level] = ["token", "action", "chunk"]


def units_of(row: list[int], level: Level) -> list[list[int]]:
    """The places in the mask of each unit that has any, one unit after the other."""
    size = {"token": 1, "action": ACTION_DIM, "chunk": len(row)}[level]
    cut = [range(first, min(first + size, len(row))) for first in range(0, len(row), size)]
    return [places for unit in cut if (places := [t for t in unit if row[t]])]


def slow(name: str, inputs: PolicyLossInputs, case: Case, level: Level) -> tuple[Tensor, Tensor, float]:
    """The mean loss over units by a loop, its gradient in the log-probs of tokens, and the mean size of what it adds."""
    leaf = inputs.log_probs.detach().clone().requires_grad_()
    assert inputs.rollout_log_probs is not None and inputs.selected is not None
    total, count, size = torch.zeros((), dtype=torch.float64), 0, 0.0
    for i, keep in enumerate(case.mask):
        row, weights = [], []
        for places in units_of(keep, level):
            first = places[0]
            new = leaf[i, first]
            for t in places[1:]:
                new = new + leaf[i, t]
            old, rollout = (sum(float(x[i, t]) for t in places) for x in (inputs.old_log_probs, inputs.rollout_log_probs))
            row.append(Token(new, old, rollout, float(inputs.advantages[i, first]), bool(inputs.selected[i, first])))
            weights.append(1.0 if inputs.weights is None else float(inputs.weights[i, first]))
        for value, weight in zip(REFERENCES[name](row, case.knobs) if row else [], weights, strict=True):
            total, count, size = total + value.loss * weight, count + 1, size + abs(value.loss.item() * weight)
    mean = total / max(count, 1)
    gradient = torch.autograd.grad(mean, leaf)[0] if mean.requires_grad else torch.zeros_like(leaf)
    return mean.detach(), gradient, size / max(count, 1)


def fast(name: str, inputs: PolicyLossInputs, knobs: Any, units: Units) -> tuple[Tensor, Tensor]:
    columns = {column: getattr(inputs, column) for column in COLUMNS if getattr(inputs, column) is not None}
    renamed = {"importance_weights" if column == "weights" else column: value for column, value in columns.items()}
    found = units.columns({**renamed, "response_mask": inputs.response_mask}, inputs.response_mask)
    if "importance_weights" in found:
        found["weights"] = found.pop("importance_weights")
    loss = POLICY_LOSSES.get(name)(PolicyLossInputs(**found), knobs).loss
    mask = found["response_mask"]
    mean = aggregate(loss, mask, "token-mean", Denominators(tokens=float(mask.sum()), sequences=1.0))
    if not mean.requires_grad:
        return mean.detach(), torch.zeros_like(inputs.log_probs)
    return mean.detach(), torch.autograd.grad(mean, inputs.log_probs)[0]


def check(name: str, level: Level, case: Case, units: Units) -> None:
    case = dataclasses.replace(case, dtype=torch.float64)
    inputs = inputs_of(case)
    value, gradient = fast(name, inputs, case.knobs, units)
    wanted, wanted_gradient, size = slow(name, inputs, case, level)
    assert abs(float(value - wanted)) <= 1e-10 * max(1.0, size)  # large losses of both signs cancel
    assert_close(gradient, wanted_gradient.tolist())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sorted(REFERENCES))
@settings(few, max_examples=10)
@given(data=st.data())
def test_every_loss_at_every_level(name: str, level: Level, data: st.DataObject) -> None:
    check(name, level, data.draw(cases(name)), Units(level=level, action_dim=ACTION_DIM))


class Means(Units):
    """Broken: the mean of a unit's log-probs in place of their sum."""

    def sums(self, values: Tensor, mask: Tensor) -> Tensor:
        counts = Units.sums(self, torch.ones_like(values), mask)
        return Units.sums(self, values, mask) / counts.clamp(min=1)


def test_the_reference_catches_another_unit() -> None:
    case = Case(
        mask=[[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]],
        seed=3,
        dtype=torch.float64,
        distance=0.3,
        kind="token",
        weighted=True,
        knobs=POLICY_LOSSES.knobs_class("vanilla")(),
    )
    for level in ("action", "chunk"):
        check("vanilla", level, case, Units(level=level, action_dim=ACTION_DIM))
        with pytest.raises(AssertionError):
            check("vanilla", level, case, Means(level=level, action_dim=ACTION_DIM))
        with pytest.raises(AssertionError):
            check("vanilla", level, case, TOKENS)


def batch() -> dict[str, Tensor]:
    """Two rows of three actions of two tokens; the last action of the second was not executed."""
    generator = torch.Generator().manual_seed(1)
    old, rollout, advantages = (torch.randn(2, 6, generator=generator) for _ in range(3))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    return {
        "old_log_probs": -old.abs(),
        "rollout_log_probs": -rollout.abs(),
        "advantages": advantages,
        "learn_mask": mask,
        "sample_index": torch.arange(2),
        "mini_batch": torch.zeros(2, dtype=torch.int64),
    }


@pytest.mark.parametrize("level", ["action", "chunk"])
def test_a_correction_weights_whole_units(level: Level) -> None:
    """The weights are those of the joint ratio, and stand on all tokens of a unit."""
    rows, units = batch(), Units(level=level, action_dim=2)
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
    found = rollout_correction(rows, HERE, config, units)
    size = 2 if level == "action" else 6
    ratio = log_ratios(rows["old_log_probs"], rows["rollout_log_probs"], rows["learn_mask"]).view(2, -1, size).sum(-1)
    wanted = correct(config, ratio, rows["learn_mask"].view(2, -1, size).any(-1), rows["advantages"][:, ::size]).weights
    assert wanted is not None
    expected = wanted.repeat_interleave(size, 1) * rows["learn_mask"]
    torch.testing.assert_close(found.columns["importance_weights"], expected.float())
    assert torch.equal(found.columns["loss_mask"], rows["learn_mask"])
    by_token = rollout_correction(rows, HERE, config).columns["importance_weights"]
    assert not torch.allclose(by_token, found.columns["importance_weights"])


@pytest.mark.parametrize(("name", "share"), [("kl_cov", {"kl_cov_ratio": 0.5}), ("clip_cov", {"clip_cov_ratio": 0.5})])
def test_whole_units_are_selected(name: str, share: dict[str, float]) -> None:
    config = ActorConfig(log_prob_level="action", policy_loss=PolicyLossConfig(loss_mode=name, kwargs=dict(share)))
    selected = select_tokens(batch(), HERE, config, seed=1, step=1, action_dim=2).columns["selected"]
    assert torch.equal(selected[:, ::2], selected[:, 1::2]) and not selected[1, 4:].any()
    assert selected.dtype == torch.uint8 and (name == "clip_cov" or int(selected.sum()) == 2 * (5 // 2))
