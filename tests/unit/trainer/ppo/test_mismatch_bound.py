"""The bound on the mismatch: sound engines of each precision pass, a corrupted one stops the run, staleness is allowed for."""

from __future__ import annotations

import math

import pytest

from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import RemoteConfig
from rlhub.errors import PolicyMismatchError
from rlhub.trainer.ppo.mismatch_bound import MismatchBound, mismatch_bound


def bound_of(device: str = "cpu", **rollout: object) -> MismatchBound:
    config = PPOConfig()
    config.trainer.device = device
    for name, value in rollout.items():
        setattr(config.actor_rollout_ref.rollout, name, value)
    derive(config)
    return mismatch_bound(config)


@pytest.mark.parametrize(
    ("bound", "usual"),
    [
        (bound_of(), 1e-5),
        (bound_of(dtype="bfloat16"), 0.02),
        (bound_of("cuda"), 0.02),
        (bound_of("cuda", dtype="float16"), 0.02),
        (bound_of(name="remote", remote=RemoteConfig(urls=["http://host:8000"])), 0.02),
    ],
)
def test_a_corrupted_engine_stops_the_run_and_a_sound_one_says_nothing(
    bound: MismatchBound, usual: float, caplog: pytest.LogCaptureFixture
) -> None:
    for kl in (usual, 0.0, -usual):
        bound.check({"mismatch/kl": kl})
    assert not caplog.text
    bound.check({"mismatch/kl": 20 * usual if usual > 1e-4 else 0.01})
    assert "does not sample from the policy that is trained" in caplog.text
    for kl in (6.14, math.inf, math.nan):
        with pytest.raises(PolicyMismatchError, match=r"mismatch/kl is .* algorithm\.rollout_correction\.mismatch_stop"):
            bound.check({"mismatch/kl": kl})


def test_the_newest_tokens_count_and_old_ones_may_be_farther_away() -> None:
    bound = bound_of()
    stale = {"mismatch/kl": 3.0, "mismatch/kl/staleness_4": 4.0}
    bound.check(stale | {"mismatch/kl/staleness_0": 1e-6})
    with pytest.raises(PolicyMismatchError, match="staleness_0"):
        bound.check(stale | {"mismatch/kl/staleness_0": 0.2})
    bound.check({"mismatch/kl": 0.3, "mismatch/kl/staleness_1": 0.3})  # one step ahead: there are no newer ones
    with pytest.raises(PolicyMismatchError, match="staleness_1"):
        bound.check({"mismatch/kl": 6.14, "mismatch/kl/staleness_1": 6.14})
    bound.check({})  # nothing was measured


def test_what_is_another_distribution_has_no_bound_but_the_one_that_is_set() -> None:
    for change in ({"top_p": 0.9}, {"top_k": 8}):
        bound_of(**change).check({"mismatch/kl": 2.0})
    config = PPOConfig()
    config.trainer.device, config.trainer.replay_from = "cpu", "somewhere"
    config.algorithm.rollout_correction.mismatch_stop = 0.5
    with pytest.raises(PolicyMismatchError, match="the bound is 0.5"):
        mismatch_bound(config).check({"mismatch/kl": 0.6})


def test_old_keys_and_values_are_allowed_for() -> None:
    assert bound_of(mode="async", recompute_kv_cache=False).oldest_keys == 1
    assert bound_of(mode="async").oldest_keys == 0
