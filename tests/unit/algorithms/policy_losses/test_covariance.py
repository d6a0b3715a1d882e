"""Tokens chosen by covariance against sorted lists, whatever the order of the rows."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.inputs import SelectionInputs
from rlhub.algorithms.policy_losses import clip_cov, kl_cov
from rlhub.algorithms.policy_losses.clip_cov import ClipCovKnobs
from rlhub.algorithms.policy_losses.covariance import token_covariance
from rlhub.algorithms.policy_losses.kl_cov import KLCovKnobs
from rlhub.algorithms.registry import POLICY_LOSSES
from tests.unit.algorithms import loss_references
from tests.unit.algorithms.cases import assert_close, catches, exact, few, garbage, masks, numbers, seeds, tensor

shares = st.sampled_from([0.0002, 0.1, 0.5, 1.0])
PARTS = {
    "clip_cov": (
        loss_references.select_clip_cov,
        st.builds(ClipCovKnobs, clip_cov_ratio=shares, clip_cov_lb=st.sampled_from([-1.0, 0.2, 1.0])),
    ),
    "kl_cov": (loss_references.select_kl_cov, st.builds(KLCovKnobs, kl_cov_ratio=shares)),
}


def cases(name: str) -> st.SearchStrategy:
    """(mask, seed, whole numbers, knobs): whole numbers make ties, which matter where tokens are ordered by covariance."""
    return st.tuples(masks(), seeds, st.booleans() if name == "kl_cov" else st.just(False), PARTS[name][1])


def inputs_of(case) -> SelectionInputs:
    mask, seed, coarse, _ = case
    keep = torch.tensor(mask)
    advantages, log_probs = numbers(seed, mask, scale=2.0), numbers(seed + 1, mask, scale=-4.0, low=0.0)
    if coarse:
        advantages, log_probs = ([[float(round(x)) for x in row] for row in table] for table in (advantages, log_probs))
    return SelectionInputs(
        old_log_probs=garbage(tensor(log_probs, torch.float64), keep),
        advantages=garbage(tensor(advantages, torch.float64), keep),
        response_mask=keep,
        keys=tensor(numbers(seed + 2, mask, low=0.0), torch.float64),
    )


def check(name: str, select, case) -> None:
    inputs, mask = inputs_of(case), case[0]
    covariance = loss_references.covariances(exact(inputs.advantages), exact(inputs.old_log_probs), mask)
    table = [[covariance.get((i, t), 0.0) for t in range(len(row))] for i, row in enumerate(mask)]
    assert_close(token_covariance(inputs), table)
    if case[2]:  # ties of the definition are ties to the last bit only in exact arithmetic
        covariance = {place: round(value, 9) for place, value in covariance.items()}
    chosen = select(inputs, case[3])
    assert chosen.dtype == torch.uint8 and chosen.shape == inputs.keys.shape
    places = {(i, t) for i, t in chosen.nonzero().tolist()}
    expected = PARTS[name][0](covariance, exact(inputs.keys), case[3])
    assert places == expected if not case[2] else sorted(map(covariance.get, places)) == sorted(map(covariance.get, expected))
    assert all(mask[i][t] for i, t in places)


@pytest.mark.parametrize("name", PARTS)
def test_selection_is_that_of_the_sorted_list(name: str) -> None:
    @few
    @given(cases(name))
    def run(case) -> None:
        check(name, POLICY_LOSSES.companion(name, "select"), case)

    run()


@pytest.mark.parametrize("name", PARTS)
def test_broken_selections_are_caught(name: str) -> None:
    select = POLICY_LOSSES.companion(name, "select")

    def negated(inputs, knobs):
        return select(dataclasses.replace(inputs, advantages=-inputs.advantages), knobs)

    def uncentred(inputs, knobs):
        shifted = dataclasses.replace(inputs, old_log_probs=inputs.old_log_probs**2)
        return select(shifted, knobs)

    def one_more(inputs, knobs):
        share = {
            knob: min(1.0, getattr(knobs, knob) + 0.4) for knob in ("clip_cov_ratio", "kl_cov_ratio") if hasattr(knobs, knob)
        }
        return select(inputs, dataclasses.replace(knobs, **share))

    for broken in (negated, uncentred, one_more):
        assert catches(functools.partial(check, name), broken, cases(name)), broken.__name__


@pytest.mark.parametrize("name", PARTS)
def test_equal_tokens_are_chosen_by_key_wherever_their_rows_stand(name: str) -> None:
    """All advantages equal: every covariance is 0, only the keys decide."""
    knobs = ClipCovKnobs(clip_cov_ratio=0.25, clip_cov_lb=-1.0) if name == "clip_cov" else KLCovKnobs(kl_cov_ratio=0.25)
    keys = torch.rand(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ones = torch.ones(4, 6)
    inputs = SelectionInputs(old_log_probs=-ones, advantages=ones, response_mask=ones.long(), keys=keys)
    select = POLICY_LOSSES.companion(name, "select")
    chosen = select(inputs, knobs)
    assert sorted(keys[chosen.bool()].tolist()) == sorted(keys.flatten().tolist())[:6]
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(select(dataclasses.replace(inputs, keys=keys[order]), knobs), chosen[order])


def test_a_mini_batch_without_tokens_or_without_a_band_selects_nothing() -> None:
    ones = torch.ones(2, 3)
    empty = SelectionInputs(old_log_probs=-ones, advantages=ones, response_mask=torch.zeros(2, 3), keys=ones.double() / 2)
    assert clip_cov.select(empty, ClipCovKnobs()).count_nonzero() == 0
    assert kl_cov.select(empty, KLCovKnobs()).count_nonzero() == 0
    flat = dataclasses.replace(empty, response_mask=ones.long())
    assert clip_cov.select(flat, ClipCovKnobs()).count_nonzero() == 0
    assert kl_cov.select(flat, KLCovKnobs()).count_nonzero() == 1


@pytest.mark.parametrize(
    ("knobs_class", "settings", "message"),
    [
        (ClipCovKnobs, {"clip_cov_ratio": 0.0}, "clip_cov_ratio is a share of the tokens"),
        (ClipCovKnobs, {"clip_cov_lb": 5.0}, "clip_cov_lb must be below clip_cov_ub, got 5.0 and 5.0"),
        (KLCovKnobs, {"kl_cov_ratio": 1.5}, "kl_cov_ratio is a share of the tokens"),
    ],
)
def test_settings_that_select_nothing_or_everything_are_refused(knobs_class, settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        knobs_class(**settings)
