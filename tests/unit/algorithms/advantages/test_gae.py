"""GAE against its definition as a sum over later model tokens, on single-turn, multi-turn and empty rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.advantages.gae import GAEKnobs, gae
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.masked import masked
from tests.unit.algorithms import references
from tests.unit.algorithms.cases import assert_close, catches, dtypes, exact, few, garbage, masks, numbers, seeds, tensor

factors = st.sampled_from([0.0, 0.3, 0.95, 1.0])
cases = st.tuples(masks(), seeds, dtypes, factors.filter(bool), factors)


def inputs_of(case) -> AdvantageInputs:
    """Rewards and values with NaN where the mask is 0."""
    mask, seed, dtype, _, _ = case
    keep = torch.tensor(mask)
    rewards, values = tensor(numbers(seed, mask), dtype), tensor(numbers(seed + 1, mask, scale=2.0), dtype)
    return AdvantageInputs(token_level_rewards=garbage(rewards, keep), response_mask=keep, values=garbage(values, keep))


def check(estimator, case) -> None:
    mask, _, _, gamma, lam = case
    inputs = inputs_of(case)
    outputs = estimator(inputs, GAEKnobs(gamma=gamma, lam=lam))
    advantages, returns = references.gae(exact(inputs.token_level_rewards), exact(inputs.values), mask, gamma, lam)
    raw = references.inside(advantages, mask)
    amplification = max(map(abs, raw), default=0.0) / (references.variance(raw) + 1e-8) ** 0.5
    assert_close(outputs.returns, returns)
    assert_close(outputs.advantages, references.whiten(advantages, mask), amplification=amplification)


@few
@given(cases)
def test_definition(case) -> None:
    check(gae, case)


def test_scanning_through_masked_tokens_is_caught() -> None:
    def over_every_token(inputs: AdvantageInputs, knobs: GAEKnobs) -> AdvantageOutputs:
        mask = inputs.response_mask
        everywhere = AdvantageInputs(
            token_level_rewards=masked(inputs.token_level_rewards, mask),
            values=masked(inputs.values, mask),
            response_mask=torch.ones_like(mask),
        )
        outputs = gae(everywhere, knobs)
        return AdvantageOutputs(advantages=masked(outputs.advantages, mask), returns=masked(outputs.returns, mask))

    assert catches(check, over_every_token, cases)


def test_swapped_knobs_and_unwhitened_advantages_are_caught() -> None:
    def swapped(inputs: AdvantageInputs, knobs: GAEKnobs) -> AdvantageOutputs:
        return gae(inputs, GAEKnobs(gamma=knobs.lam, lam=knobs.gamma))

    def raw(inputs: AdvantageInputs, knobs: GAEKnobs) -> AdvantageOutputs:
        outputs = gae(inputs, knobs)
        advantages = masked(outputs.returns - masked(inputs.values, inputs.response_mask), inputs.response_mask)
        return AdvantageOutputs(advantages=advantages, returns=outputs.returns)

    assert catches(check, swapped, cases)
    assert catches(check, raw, cases)


@few
@given(cases, st.integers(1, 4), seeds)
def test_padding_gaps_and_row_order_do_not_matter(case, extra, seed) -> None:
    """Columns of masked tokens anywhere, and another order of the rows, leave the model tokens' results as they were."""
    inputs, knobs = inputs_of(case), GAEKnobs(gamma=case[3], lam=case[4])
    rows, width = inputs.response_mask.shape
    generator = torch.Generator().manual_seed(seed)
    where = torch.randperm(width + extra, generator=generator)[:width].sort().values
    order = torch.randperm(rows, generator=generator)

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(rows, width + extra, dtype=values.dtype)
        wide[:, where] = values
        return wide[order]

    plain = gae(inputs, knobs)
    other = gae(
        AdvantageInputs(
            token_level_rewards=spread(inputs.token_level_rewards),
            response_mask=spread(inputs.response_mask),
            values=spread(inputs.values),
        ),
        knobs,
    )
    torch.testing.assert_close(other.returns, spread(plain.returns), rtol=0, atol=1e-12)
    torch.testing.assert_close(other.advantages, spread(plain.advantages), rtol=1e-5, atol=1e-6)


def reward_outside(row_masks: list[list[int]]) -> AdvantageInputs:
    """Every row's reward in its last column."""
    mask = torch.tensor(row_masks)
    rewards = torch.zeros(mask.shape)
    rewards[:, -1] = 1.0
    return AdvantageInputs(token_level_rewards=rewards, response_mask=mask, values=torch.zeros(mask.shape))


def test_a_reward_on_a_masked_token_is_an_error_that_names_the_row() -> None:
    """A row without model tokens has nowhere to put its reward and is not to blame."""
    with pytest.raises(ValueError, match="row 2, token 2: "):
        gae(reward_outside([[0, 0, 0], [1, 0, 1], [1, 1, 0]]), GAEKnobs())
    gae(reward_outside([[0, 0, 0], [1, 0, 1], [1, 1, 1]]), GAEKnobs())


def test_a_batch_without_tokens() -> None:
    for shape in ((0, 3), (2, 0)):
        empty = torch.zeros(shape)
        outputs = gae(AdvantageInputs(token_level_rewards=empty, response_mask=empty.long(), values=empty), GAEKnobs())
        assert outputs.advantages.shape == outputs.returns.shape == shape
