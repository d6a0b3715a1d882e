"""GRPO, Dr. GRPO and RLOO against loops over each sample's group."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.advantages.grpo import GRPOKnobs, grpo
from rlhub.algorithms.advantages.rloo import rloo
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.masked import masked
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, few, garbage, masks, numbers, seeds, tensor

cases = st.tuples(masks(max_rows=9), seeds, dtypes, st.booleans())


def inputs_of(case) -> AdvantageInputs:
    """Dense rewards, or one outcome of few possible ones on the last model token; groups of any size, ids of any value."""
    mask, seed, dtype, dense = case
    generator = random.Random(seed)
    rewards = numbers(seed, mask)
    if not dense:
        rewards = [[0.0] * len(row) for row in mask]
        for row, keep in zip(rewards, mask, strict=True):
            if any(keep):
                row[max(t for t, m in enumerate(keep) if m)] = generator.choice([0.0, 0.1, 1.0])
    group = [generator.choice([-3, 0, 7, 10**12]) for _ in mask]
    keep = torch.tensor(mask)
    return AdvantageInputs(
        token_level_rewards=garbage(tensor(rewards, dtype), keep), response_mask=keep, group=torch.tensor(group)
    )


def compare(outputs: AdvantageOutputs, inputs: AdvantageInputs, per_row: list[float]) -> None:
    expected = references.broadcast(per_row, inputs.response_mask.tolist())
    assert_close(outputs.advantages, expected)
    assert_close(outputs.returns, expected)


def outcome_of(inputs: AdvantageInputs) -> list[float]:
    return references.outcomes(inputs.token_level_rewards.double().tolist(), inputs.response_mask.tolist())


def check_grpo(estimator, case, *, divide: bool = True) -> None:
    inputs = inputs_of(case)
    outputs = estimator(inputs, GRPOKnobs(norm_adv_by_std_in_grpo=divide))
    compare(outputs, inputs, references.grpo(outcome_of(inputs), inputs.group.tolist(), divide))


def check_rloo(estimator, case) -> None:
    inputs = inputs_of(case)
    compare(estimator(inputs, None), inputs, references.rloo(outcome_of(inputs), inputs.group.tolist()))


@few
@given(cases, st.booleans())
def test_grpo(case, divide) -> None:
    check_grpo(grpo, case, divide=divide)


@few
@given(cases)
def test_rloo(case) -> None:
    check_rloo(rloo, case)


def one_group(inputs: AdvantageInputs, knobs: GRPOKnobs | None, estimator=grpo) -> AdvantageOutputs:
    """Broken: the whole batch as one group."""
    same = torch.zeros_like(inputs.group)
    return estimator(
        AdvantageInputs(token_level_rewards=inputs.token_level_rewards, response_mask=inputs.response_mask, group=same), knobs
    )


def test_broken_variants_are_caught() -> None:
    def biased(inputs: AdvantageInputs, knobs: GRPOKnobs) -> AdvantageOutputs:
        sizes = (inputs.group[:, None] == inputs.group[None]).sum(1).double()
        factor = (sizes / (sizes - 1).clamp(min=1)).sqrt()[:, None].to(inputs.token_level_rewards.dtype)
        outputs = grpo(inputs, knobs)
        return AdvantageOutputs(advantages=outputs.advantages * factor, returns=outputs.returns * factor)

    def without_own_group(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
        return grpo(inputs, GRPOKnobs(norm_adv_by_std_in_grpo=False))

    assert catches(check_grpo, biased, cases)
    assert catches(check_grpo, one_group, cases)
    assert catches(functools.partial(check_grpo, divide=False), lambda inputs, knobs: grpo(inputs, GRPOKnobs()), cases)
    assert catches(check_rloo, without_own_group, cases)
    assert catches(check_rloo, functools.partial(one_group, estimator=rloo), cases)


def equal_rewards(value: float, rows: int, dtype: torch.dtype) -> AdvantageInputs:
    rewards = torch.full((rows, 1), value, dtype=dtype)
    return AdvantageInputs(
        token_level_rewards=rewards, response_mask=torch.ones(rows, 1).long(), group=torch.zeros(rows, dtype=torch.int64)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(rows: int, dtype: torch.dtype) -> None:
    inputs = equal_rewards(0.1, rows, dtype)
    for outputs in (grpo(inputs, GRPOKnobs()), grpo(inputs, GRPOKnobs(norm_adv_by_std_in_grpo=False)), rloo(inputs, None)):
        assert outputs.advantages.count_nonzero() == 0
        assert outputs.metrics["groups/singleton"] == float(rows == 1)
        assert outputs.metrics["groups/all_equal"] == float(rows > 1)


def test_the_rounded_standard_deviation_alone_would_not_give_zero() -> None:
    """The control of the test above: dividing rounding noise by the rounded spread gives a large advantage."""
    rewards = torch.tensor([0.1] * 7, dtype=torch.float64)
    noise = rewards - sum(rewards.tolist()) / 7
    assert noise.abs().max() > 0


@few
@given(cases, seeds, st.sampled_from(["grpo", "rloo"]))
def test_row_order_group_names_and_padding_do_not_matter(case, seed, name) -> None:
    estimator, knobs = {"grpo": (grpo, GRPOKnobs()), "rloo": (rloo, None)}[name]
    inputs = inputs_of(case)
    order = torch.randperm(len(inputs.group), generator=torch.Generator().manual_seed(seed))
    pad = torch.nn.functional.pad
    other = AdvantageInputs(
        token_level_rewards=pad(inputs.token_level_rewards, (0, 2), value=float("nan"))[order],
        response_mask=pad(inputs.response_mask, (0, 2))[order],
        group=(5 - 2 * inputs.group)[order],
    )
    expected = pad(estimator(inputs, knobs).advantages, (0, 2))[order]
    torch.testing.assert_close(estimator(other, knobs).advantages, expected, rtol=1e-6, atol=1e-6)


@few
@given(cases)
def test_advantages_of_a_group_cancel(case) -> None:
    inputs = inputs_of(case)
    inputs.response_mask[:, 0] = 1
    inputs.token_level_rewards = masked(inputs.token_level_rewards.nan_to_num(), inputs.response_mask)
    for outputs in (grpo(inputs, GRPOKnobs()), rloo(inputs, None)):
        for uid in inputs.group.unique():
            assert abs(outputs.advantages[inputs.group == uid, 0].sum().item()) < 1e-5
