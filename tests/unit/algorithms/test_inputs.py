"""A sample's outcome, its advantage on its tokens, and what the inputs do with numbers outside the mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from rlhub.algorithms.inputs import AdvantageInputs
from rlhub.errors import ProtocolError
from tests.unit.algorithms import references
from tests.unit.algorithms.advantages.estimators import cases, inputs_of
from tests.unit.algorithms.cases import assert_close, catches, few

DTYPES = (torch.int64, torch.bool, torch.float32, torch.float64)


def of(rewards: torch.Tensor, mask: torch.Tensor) -> AdvantageInputs:
    return AdvantageInputs(token_level_rewards=rewards, response_mask=mask)


def check_outcomes(outcomes, case) -> None:
    inputs = inputs_of(case)
    got = outcomes(inputs)
    assert got.dtype == torch.float64
    expected = references.outcomes(inputs.token_level_rewards.double().tolist(), inputs.response_mask.tolist())
    assert_close(got, expected)


@few
@given(cases)
def test_outcomes(case) -> None:
    check_outcomes(AdvantageInputs.outcome_rewards, case)


def test_a_mean_or_a_sum_with_what_is_masked_is_caught() -> None:
    assert catches(check_outcomes, lambda inputs: inputs.token_level_rewards.double().mean(1), cases)
    assert catches(check_outcomes, lambda inputs: inputs.response_mask.sum(1) + inputs.outcome_rewards(), cases)


def test_few_rewards_are_added_in_float64() -> None:
    """Equal rewards at other places are equal outcomes, bit for bit; float32 would part them."""
    values = torch.tensor([0.1, 0.7, 1e-3, 0.2])
    rewards = torch.zeros(24, 2560)
    generator = torch.Generator().manual_seed(0)
    for row in rewards:
        place = int(torch.randint(0, 2556, (1,), generator=generator))
        row[place : place + 4] = values[torch.randperm(4, generator=generator)]
    outcome = of(rewards, torch.ones_like(rewards)).outcome_rewards()
    assert len(outcome.unique()) == 1 and outcome[0] == math.fsum(values.tolist())
    one_by_one = sum(rewards.unbind(1))  # the control
    assert isinstance(one_by_one, torch.Tensor) and len(one_by_one.unique()) > 1


def test_no_reward_is_too_small_or_cancels() -> None:
    rewards = torch.zeros(2, 128)
    rewards[0, 3], rewards[1, 5], rewards[1, 6] = 1e-40, -1.0, 1.0
    rewards[1, 70] = -(2.0**-30)
    assert of(rewards, torch.ones_like(rewards)).outcome_rewards().tolist() == [float(rewards[0, 3]), -(2.0**-30)]


@pytest.mark.parametrize("mask_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_tokens(mask_dtype: torch.dtype, dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]]).to(mask_dtype)
    expected = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0], [-2.0, -2.0, 0.0]], dtype=dtype)
    inputs = of(torch.zeros(3, 3, dtype=dtype), mask)
    for nobodys in (7.0, torch.nan, torch.inf):
        per_sample = torch.tensor([0.5, nobodys, -2.0], dtype=torch.float64)
        assert torch.equal(inputs.on_tokens(per_sample), expected), "a row without tokens is 0 whatever its number is"


@pytest.mark.parametrize("mask_dtype", DTYPES)
@pytest.mark.parametrize("lost", [1.0, -1e-30, float("inf")])
def test_a_reward_on_a_token_the_model_did_not_write_is_an_error(lost: float, mask_dtype: torch.dtype) -> None:
    """Where it was ignored, a whole run learned nothing while its mean reward looked healthy.  Rows of which nothing trains,
    as samples without a valid score, have no token for their reward and are not to blame."""
    mask = torch.tensor([[0, 0, 0], [1, 0, 1], [1, 1, 0]])
    rewards = torch.tensor([[lost, 0, 0], [0, torch.nan, 2.0], [0, 1.0, lost]])
    with pytest.raises(ProtocolError, match=r"row 2, token 2: .*response_mask is 0.*\(1 such tokens\)"):
        of(rewards, mask.to(mask_dtype))
    rewards[2, 2] = torch.nan
    given, before = mask.to(mask_dtype), rewards.clone()
    inputs = of(rewards, given)
    assert inputs.token_level_rewards.tolist() == [[0, 0, 0], [0, 0, 2.0], [0, 1.0, 0]]
    assert torch.equal(given, mask.to(mask_dtype)), "the batch's own columns are left as they were"
    torch.testing.assert_close(rewards, before, rtol=0, atol=0, equal_nan=True)
