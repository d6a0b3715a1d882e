"""All advantage estimators against loops, the invariances they share, and broken variants that the comparison must catch."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.algorithms.advantages import optimal_token_baseline as otb
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, SampleInputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from tests.unit.algorithms.advantages.estimators import (
    REFERENCES,
    RUNS,
    cases,
    check,
    check_invalid,
    check_rearranged,
    columns_of,
    estimate,
    inputs_of,
    run_id,
)
from tests.unit.algorithms.cases import catches, few

quick = settings(few, max_examples=15)
every_run = pytest.mark.parametrize(("name", "knobs"), RUNS, ids=run_id)
every_name = pytest.mark.parametrize("name", sorted(REFERENCES))


def test_every_estimator_has_a_reference() -> None:
    assert set(REFERENCES) == {name for name in ADVANTAGE_ESTIMATORS.names() if _ours(name)}


def _ours(name: str) -> bool:
    """Not one that another test registered, nor one over episodes, which test_chunk_estimators.py has."""
    if "episodes" in ADVANTAGE_ESTIMATORS.row(name).requires:
        return False
    return str(ADVANTAGE_ESTIMATORS.get(name).__module__).startswith("rlhub.")


@every_run
@quick
@given(case=cases)
def test_formula(name: str, knobs: dict[str, Any], case: Any) -> None:
    check(lambda inputs: estimate(name, knobs, inputs), case, name, knobs)


def check_per_sample(per_sample: Any, case: Any, name: str, knobs: dict[str, Any]) -> None:
    """From outcomes, groups and token counts alone; where the tokens are does not matter."""
    inputs = inputs_of(case)
    tokens = estimate(name, knobs, inputs)
    counts = inputs.response_mask.sum(1)
    samples = SampleInputs(rewards=inputs.outcome_rewards(), group=inputs.group, num_tokens=counts)
    knobs_class = ADVANTAGE_ESTIMATORS.knobs_class(name)
    outputs = per_sample(samples, knobs_class(**knobs) if knobs_class else None)
    assert outputs.advantages.dtype == torch.float64 and outputs.advantages.shape == counts.shape
    assert torch.equal(tokens.advantages, inputs.on_tokens(outputs.advantages)) and torch.equal(tokens.returns, tokens.advantages)
    assert outputs.metrics == tokens.metrics


per_sample_runs = [run for run in RUNS if ADVANTAGE_ESTIMATORS.companion(run[0], "per_sample")]


@pytest.mark.parametrize(("name", "knobs"), per_sample_runs, ids=run_id)
@quick
@given(case=cases)
def test_one_number_a_sample_is_the_estimator_on_tokens(name: str, knobs: dict[str, Any], case: Any) -> None:
    check_per_sample(ADVANTAGE_ESTIMATORS.companion(name, "per_sample"), case, name, knobs)


@pytest.mark.parametrize("name", ["opo", "gpg"])
def test_a_companion_that_does_not_know_which_rows_have_tokens_is_caught(name: str) -> None:
    def everywhere(samples: SampleInputs, knobs: Any) -> Any:
        blind = dataclasses.replace(samples, num_tokens=torch.ones_like(samples.num_tokens))
        return ADVANTAGE_ESTIMATORS.companion(name, "per_sample")(blind, knobs)

    assert catches(lambda broken, case: check_per_sample(broken, case, name, {}), everywhere, cases)


# Broken variants


def instead(name: str, **knobs: Any) -> Any:
    return lambda inputs: estimate(name, knobs, inputs)


def unwhitened(inputs: AdvantageInputs) -> AdvantageOutputs:
    outputs = estimate("reinforce_plus_plus", {}, inputs)
    return dataclasses.replace(outputs, advantages=outputs.returns)


def unwhitened_gae(inputs: AdvantageInputs) -> AdvantageOutputs:
    outputs = estimate("gae", {}, inputs)
    return dataclasses.replace(outputs, advantages=outputs.returns - masked(inputs.values, inputs.response_mask))


def gae_through_masked_tokens(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Tool output discounts and bootstraps too."""
    mask = inputs.response_mask
    everywhere = dataclasses.replace(inputs, values=masked(inputs.values, mask), response_mask=torch.ones_like(mask))
    outputs = estimate("gae", {"gamma": 0.9, "lam": 0.7}, everywhere)
    return AdvantageOutputs(advantages=masked(outputs.advantages, mask), returns=masked(outputs.returns, mask))


def biased(inputs: AdvantageInputs) -> AdvantageOutputs:
    """GRPO with the standard deviation of the population."""
    assert inputs.group is not None
    sizes = (inputs.group[:, None] == inputs.group[None]).sum(1).double()
    advantages = estimate("grpo", {}, inputs).advantages
    advantages = advantages * (sizes / (sizes - 1).clamp(min=1)).sqrt()[:, None].to(advantages.dtype)
    return AdvantageOutputs(advantages=advantages, returns=advantages)


def one_group(name: str) -> Any:
    """The whole batch as one group."""
    return lambda inputs: estimate(name, {}, dataclasses.replace(inputs, group=torch.zeros_like(inputs.group)))


def undivided_sum(inputs: AdvantageInputs) -> AdvantageOutputs:
    """GRPO of the summed components, whitened: what GDPO is not."""
    assert inputs.reward_components is not None
    total = torch.stack(list(inputs.reward_components.values())).sum(0).nan_to_num()
    mask = inputs.response_mask.clone()
    return estimate("gdpo", {}, dataclasses.replace(inputs, response_mask=mask, reward_components={"sum": total}))


def scaled_by_nonzero_rewards(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The factor as it is elsewhere."""
    rewards = inputs.outcome_rewards()
    factor = len(rewards) / max(int(rewards.count_nonzero()), 1)
    plain = estimate("grpo", {"norm_adv_by_std_in_grpo": False}, inputs).advantages * factor
    return AdvantageOutputs(advantages=plain, returns=plain)


def counting_columns(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Rows meet at equal columns, tool output included, and beyond the second longest."""
    true = otb.weighted_means
    with mock.patch.object(otb, "weighted_means", lambda v, w, keep, g: true(v, w, torch.ones_like(keep), g)):
        return estimate("optimal_token_baseline", {}, inputs)


def equal_weights(inputs: AdvantageInputs) -> AdvantageOutputs:
    assert inputs.old_log_probs is not None
    certain = dataclasses.replace(inputs, sum_pi_squared=torch.full_like(inputs.old_log_probs, 0.2))
    return estimate("optimal_token_baseline", {}, certain)


def against_nothing(inputs: AdvantageInputs) -> AdvantageOutputs:
    zeros = torch.zeros(len(inputs.response_mask), dtype=torch.float64)
    return estimate("remax", {}, dataclasses.replace(inputs, baseline_rewards=zeros))


def through_masked_tokens(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Discounted at tool output too."""
    everywhere = torch.ones_like(inputs.response_mask)
    given = masked(inputs.token_level_rewards, inputs.response_mask)
    outputs = estimate("remax", {"gamma": 0.8}, dataclasses.replace(inputs, token_level_rewards=given, response_mask=everywhere))
    returns = masked(outputs.returns, inputs.response_mask)
    return AdvantageOutputs(advantages=returns - inputs.on_tokens(inputs.baseline_rewards), returns=returns)


BROKEN = [
    ("gae", {"gamma": 0.9, "lam": 0.7}, instead("gae", gamma=0.7, lam=0.9)),
    ("gae", {"gamma": 0.9, "lam": 0.7}, gae_through_masked_tokens),
    ("gae", {}, unwhitened_gae),
    ("grpo", {}, biased),
    ("grpo", {}, one_group("grpo")),
    ("rloo", {}, one_group("rloo")),
    ("grpo", {}, instead("grpo", norm_adv_by_std_in_grpo=False)),
    ("grpo", {}, instead("rloo")),
    ("grpo_passk", {}, instead("grpo")),
    ("grpo_passk", {}, instead("grpo_passk", norm_adv_by_std_in_grpo=False)),
    ("reinforce_plus_plus", {}, unwhitened),
    ("reinforce_plus_plus", {"gamma": 0.8}, instead("reinforce_plus_plus")),
    ("reinforce_plus_plus_baseline", {}, instead("grpo", norm_adv_by_std_in_grpo=False)),
    ("remax", {}, against_nothing),
    ("remax", {"gamma": 0.8}, through_masked_tokens),
    ("rloo", {}, instead("grpo", norm_adv_by_std_in_grpo=False)),
    ("opo", {}, instead("cpgd", weighting="plain")),
    ("gpg", {}, instead("cpgd", weighting="plain")),
    ("gpg", {}, instead("cpgd", weighting="clip-scaled")),
    ("gpg", {}, scaled_by_nonzero_rewards),
    ("optimal_token_baseline", {}, counting_columns),
    ("optimal_token_baseline", {}, equal_weights),
    ("gdpo", {}, undivided_sum),
    ("gdpo", {"reward_weights": {"length": 0.5, "right": -2}}, instead("gdpo")),
    ("cpgd", {}, instead("cpgd", weighting="plain")),
    ("cpgd", {"weighting": "clip-scaled"}, instead("cpgd", weighting="plain")),
    ("cpgd", {"weighting": "clip-scaled"}, instead("gpg")),
]


@pytest.mark.parametrize(("name", "knobs", "broken"), BROKEN, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(BROKEN)])
def test_broken_variants_are_caught(name: str, knobs: dict[str, Any], broken: Any) -> None:
    assert catches(lambda estimator, case: check(estimator, case, name, knobs), broken, cases)


# Invariances

# name -> a group of one keeps its reward (the baseline is 0) instead of 0
KEEPS_SINGLETON = {"opo", "optimal_token_baseline"}
GROUPED = sorted(name for name in REFERENCES if "groups" in ADVANTAGE_ESTIMATORS.row(name).requires)


def test_names_of_estimators_by_group_are_read_from_their_rows() -> None:
    assert set(REFERENCES) > set(GROUPED) > KEEPS_SINGLETON


@every_name
@quick
@given(case=cases, seed=st.integers(0, 10**6), extra=st.integers(1, 70))
def test_padding_row_order_and_group_names_do_not_matter(name: str, case: Any, seed: int, extra: int) -> None:
    check_rearranged(name, case, seed, extra)


@every_name
@quick
@given(case=cases, count=st.integers(1, 4))
def test_invalid_samples_move_nobody(name: str, case: Any, count: int) -> None:
    check_invalid(name, case, count)


@every_name
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_masked_is_never_read(name: str, junk: float) -> None:
    """For masks of every dtype that may come."""
    inputs, knobs = inputs_of((11, torch.float32, "process", 7, 90)), REFERENCES[name][1][-1]
    plain = estimate(name, knobs, inputs)
    keep = inputs.response_mask.bool()
    columns = ["values", "old_log_probs", "sum_pi_squared"] + ["token_level_rewards"] * math.isnan(junk)  # others are refused
    dirty = {column: torch.where(keep, getattr(inputs, column), junk) for column in columns}
    for dtype in (torch.int64, torch.bool, torch.float32):
        other = estimate(name, knobs, dataclasses.replace(inputs, **dirty, response_mask=inputs.response_mask.to(dtype)))
        assert torch.equal(other.advantages, plain.advantages) and torch.equal(other.returns, plain.returns)
        assert not other.advantages[~keep].any() and not other.returns[~keep].any()


@every_name
def test_inputs_are_left_as_they_were(name: str) -> None:
    inputs = inputs_of((11, torch.float32, "dense", 1, 90))
    before = {field.name: copy.deepcopy(getattr(inputs, field.name)) for field in columns_of(inputs)}
    estimate(name, {}, inputs)
    for field, value in before.items():
        torch.testing.assert_close(getattr(inputs, field), value, rtol=0, atol=0, equal_nan=True)


@every_name
def test_a_batch_without_tokens(name: str) -> None:
    for rows, width in ((0, 3), (2, 0), (0, 0), (3, 80)):
        floats = torch.full((rows, width), torch.nan)
        per_row = torch.zeros(rows, dtype=torch.float64)
        inputs = AdvantageInputs(
            token_level_rewards=floats,
            response_mask=torch.zeros(rows, width).long(),
            group=-1 - torch.arange(rows),
            values=floats,
            old_log_probs=floats,
            ref_log_prob=floats,
            sum_pi_squared=floats,
            baseline_rewards=per_row,
            reward_components={"right": per_row},
        )
        outputs = estimate(name, {}, inputs)
        assert outputs.advantages.shape == outputs.returns.shape == (rows, width)
        assert not outputs.advantages.any() and all(map(math.isfinite, outputs.metrics.values()))


# Groups without a signal


def alike(rows: int, dtype: torch.dtype = torch.float32) -> AdvantageInputs:
    """One group of equal rewards 0.1, whose rounded spread is not 0."""
    ones = torch.ones(rows, 1, dtype=dtype)
    return AdvantageInputs(
        token_level_rewards=0.1 * ones,
        response_mask=torch.ones(rows, 1).long(),
        group=torch.zeros(rows).long(),
        old_log_probs=-ones,
        sum_pi_squared=0.3 * ones,
        reward_components={"right": torch.full((rows,), 0.1, dtype=torch.float64)},
    )


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_equal_rewards_and_groups_of_one(name: str, rows: int, dtype: torch.dtype) -> None:
    """Exactly 0 without an ulp of noise; the two whose baseline is 0 for a group of one then keep the reward."""
    for knobs in REFERENCES[name][1]:
        if "reward_weights" in knobs:
            continue
        outputs = estimate(name, knobs, alike(rows, dtype))
        if rows == 1 and name in KEEPS_SINGLETON:
            assert torch.equal(outputs.advantages, alike(rows, dtype).token_level_rewards)
        elif name == "optimal_token_baseline":
            assert outputs.advantages.abs().max() < 1e-7  # a weighted mean of equal numbers, to rounding
        else:
            assert outputs.advantages.count_nonzero() == 0
            assert outputs.metrics["groups/singleton"] == float(rows == 1)
            equal = outputs.metrics.get("groups/all_equal", outputs.metrics.get("groups/all_equal/right"))
            assert equal == float(rows > 1)


def test_the_rounded_mean_of_equal_rewards_is_not_the_reward() -> None:
    """The control of the test above: rounding alone would leave an advantage."""
    rewards = torch.tensor([0.1] * 7, dtype=torch.float64)
    assert (rewards - sum(rewards.tolist()) / 7).abs().max() > 0
