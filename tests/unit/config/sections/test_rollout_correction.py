"""Spellings of the rollout correction, what is refused with which remedy, and what is set without effect."""

from __future__ import annotations

import shlex

import pytest

from rlhub.config.load import collect
from rlhub.config.rules import checks, effects
from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout_correction import (
    Bounds,
    RolloutCorrectionConfig,
    notes,
    problems,
    rejection_bounds,
    weight_bounds,
)

KEY = "algorithm.rollout_correction"


def load(text: str):
    """The section as a command line gives it; keys without the section's name."""
    return collect(PPOConfig, "ppo", [f"{KEY}.{word}" for word in shlex.split(text)])


def correction(text: str) -> RolloutCorrectionConfig:
    loaded = load(text)
    assert loaded.problems == []
    return loaded.config.algorithm.rollout_correction


def faults(text: str) -> list[str]:
    loaded = load(text)
    return [*loaded.problems, *problems(loaded.config.algorithm.rollout_correction)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.0", (None, 2.0)), ("3", (None, 3.0)), ('"2.0"', (None, 2.0)), ("0.5_5.0", (0.5, 5.0)), ('"0.5_5.0"', (0.5, 5.0))],
)
def test_thresholds_of_weights(text: str, expected: tuple[float | None, float]) -> None:
    config = correction(f"rollout_is=token rollout_is_threshold='{text}'")
    assert problems(config) == []
    assert weight_bounds(config.rollout_is_threshold) == Bounds(lower=expected[0], upper=expected[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout_rs=token_k1 rollout_rs_threshold=0.5_2.0", {"token_k1": (0.5, 2.0)}),
        ("rollout_rs=seq_sum_k1 rollout_rs_threshold=4", {"seq_sum_k1": (0.25, 4.0)}),
        ("rollout_rs=seq_max_k2 rollout_rs_threshold=0.01", {"seq_max_k2": (None, 0.01)}),
        ("rollout_rs=token_k2 rollout_rs_threshold=1e-5", {"token_k2": (None, 1e-5)}),
        (
            """rollout_rs='"token_k1,seq_max_k3"' rollout_rs_threshold='"0.5_2.0,0.01"'""",
            {"token_k1": (0.5, 2.0), "seq_max_k3": (None, 0.01)},
        ),
        ("rollout_rs=[seq_mean_k2,token_k3] rollout_rs_threshold=[0.1,2]", {"seq_mean_k2": (None, 0.1), "token_k3": (None, 2.0)}),
        ("rollout_rs=[token_k2,token_k3,token_k2] rollout_rs_threshold=0.1", {"token_k2": (None, 0.1), "token_k3": (None, 0.1)}),
        ("rollout_rs=null rollout_rs_threshold=0.1", {}),
    ],
)
def test_rules_and_their_thresholds(text: str, expected: dict[str, tuple[float | None, float]]) -> None:
    config = correction(text)
    assert problems(config) == []
    found = rejection_bounds(config.rollout_rs, config.rollout_rs_threshold)
    assert {name: (bounds.lower, bounds.upper) for name, bounds in found.items()} == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rollout_is=tokens", "did you mean 'token'"),
        ("rollout_is_threshhold=2", "did you mean algorithm.rollout_correction.rollout_is_threshold"),
        ("rollout_is_threshold=0.5_5", "read as 0.55"),
        ("rollout_is_threshold=5.0_0.5", 'a band "lo_hi" with 0 < lo <= hi'),
        ("rollout_is_threshold=0.5_x", 'a band "lo_hi"'),
        ("rollout_is_threshold=-2.0", "a positive number"),
        ("rollout_is_threshold=0_5.0", "0 < lo"),
        ("rollout_rs=token_k1", "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ("rollout_rs=token_k4 rollout_rs_threshold=1", "did you mean 'token_k"),
        ("rollout_rs=geometric rollout_rs_threshold=1.001", "known: token_k1, seq_sum_k1, seq_mean_k1"),
        ("rollout_rs=token_k2 rollout_rs_threshold=0.5_2.0", "expected one number, the largest divergence"),
        ("rollout_rs=token_k1 rollout_rs_threshold=0.5", "must be at least 1"),
        ("rollout_rs=[token_k1,token_k2,token_k3] rollout_rs_threshold=[0.5_2.0,1]", "got 2 thresholds for 3 rules"),
        ("m2po_threshold=0", "out of range"),
        ("proximal=a3p0", "did you mean 'a3po'"),
        ("bypass_mode=true m2po_threshold=0.04", "needs the whole batch's log-ratios"),
        ("bypass_mode=true rollout_is=token rollout_is_batch_normalize=true", "turn one of them off"),
        ("proximal=a3po rollout_is=token rollout_is_batch_normalize=true", "proximal=a3po knows only inside it"),
        ("proximal=a3po bypass_mode=true", "both say what the old log-probs are"),
        ("mismatch_warn=2 mismatch_stop=1.5", "mismatch_warn=2 is above algorithm.rollout_correction.mismatch_stop=1.5"),
    ],
)
def test_what_is_refused_says_why_and_what_to_write(text: str, said: str) -> None:
    (problem,) = faults(text)
    assert problem.startswith(KEY) and said in problem


def test_the_section_is_checked_with_the_rest() -> None:
    loaded = load("rollout_rs=token_k1")
    derive(loaded.config)
    assert any("rollout_rs_threshold" in problem for problem in checks.check(loaded.config))


def test_an_estimator_that_needs_the_pass_which_bypass_saves_is_refused() -> None:
    config = load("bypass_mode=true").config
    (problem,) = checks.check_requirements(config, {"sum_pi_squared"})
    assert "bypass_mode=true" in problem and "set it to false" in problem
    config.algorithm.rollout_correction.bypass_mode = False
    assert checks.check_requirements(config, {"sum_pi_squared"}) == []


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        ("rollout_is_threshold=3.0", "rollout_is is null"),
        ("rollout_is_batch_normalize=true", "rollout_is is null"),
        ("rollout_rs_threshold=0.5_2.0", "rollout_rs is null"),
    ],
)
def test_a_threshold_without_its_switch_has_no_effect(text: str, unread: str) -> None:
    loaded = load(text)
    derive(loaded.config)
    (warning,) = effects.without_effect(loaded.config, loaded.set_keys)
    assert warning.startswith(f"{KEY}.{text.partition('=')[0]}=") and unread in warning
    switched = load(f"{text} rollout_is=token rollout_rs=token_k1")
    derive(switched.config)
    assert effects.without_effect(switched.config, switched.set_keys) == []


def test_a3po_says_what_it_does_without_stale_samples() -> None:
    assert notes(correction("proximal=a3po rollout_is=token"))[0].endswith("no clip")
    assert any("without algorithm.rollout_correction.rollout_is" in note for note in notes(correction("proximal=a3po")))
    assert notes(correction("rollout_is=token")) == []


def test_what_is_active_and_what_happens_in_the_update() -> None:
    assert not RolloutCorrectionConfig().active and not RolloutCorrectionConfig().in_update
    for text in ("rollout_is=token", "rollout_rs=token_k2", "m2po_threshold=0.04"):
        assert correction(text).active and not correction(text).in_update
    assert correction("bypass_mode=true").in_update and correction("proximal=a3po").in_update


def test_false_turns_weights_and_rejection_off_as_null_does() -> None:
    """The spelling of earlier command lines."""
    assert correction("rollout_is=false rollout_rs=False") == correction("rollout_is=null rollout_rs=null")
    assert any("rollout_is" in problem for problem in load("rollout_is=true").problems)
    assert load("bypass_mode=false").problems == []
