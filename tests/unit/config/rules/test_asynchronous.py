"""Rules of asynchronous rollouts in the configuration."""

from __future__ import annotations

import pytest

from rlhub.config.rules import asynchronous, checks, effects
from tests.unit.config.rules.test_derive import good

ASYNC = {"actor_rollout_ref__rollout__mode": "async"}
CORRECTED = {"algorithm__rollout_correction__rollout_is": "token"}
ROLLOUT = "actor_rollout_ref__rollout__"
AGENT = f"{ROLLOUT}agent__"
CPUS = "actor_rollout_ref.rollout.agent.env_host_cpus"
ENVIRONMENT = {f"{AGENT}num_env_hosts": 2, f"{AGENT}kwargs": {"environment": "grid_walk"}}
PAIR = ASYNC | {"trainer__pools": {"gen": {"n_gpus_per_node": 2}}, "trainer__placement": {"rollout": "gen"}}
COLLECTED = ASYNC | CORRECTED | {
    f"{ROLLOUT}trajectories_folder": "s3://t", f"{ROLLOUT}weights_folder": "w", "trainer__stale_policy": "correct",
}  # fmt: skip


def test_what_follows_from_the_bound() -> None:
    config = good(**ASYNC, trainer__max_staleness=3, data__train_batch_size=8, actor_rollout_ref__actor__ppo_mini_batch_size=8)
    agent = config.actor_rollout_ref.rollout.agent
    assert (config.trainer.pipeline_depth, agent.max_concurrent) == (3, 32)
    assert agent.episode_timeout_s == config.trainer.deadline_s.generate
    assert checks.check(config) == []


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"trainer__max_staleness": 2}, ("trainer.max_staleness=2", "mode=async")),
        ({"actor_rollout_ref__rollout__multi_turn__enable": True}, ("multi_turn.enable=true", "mode=async")),
        ({"actor_rollout_ref__rollout__agent__default_agent_loop": "mine.py:Mine"}, ("mine.py:Mine", "mode=async")),
        (ASYNC | {"trainer__stale_policy": "correct"}, ("stale_policy=correct", "rollout_is=token", "drop or mask")),
        (COLLECTED | {f"{ROLLOUT}weights_folder": None}, ("trajectories_folder=s3://t", "rollout.weights_folder", "both reach")),
        (COLLECTED | {"trainer__stale_policy": "mask"}, ("stale_policy=mask", "s3://t", "set trainer.stale_policy=correct")),
        (COLLECTED | {"trainer__test_freq": 5}, ("test_freq=5", "s3://t", "main_eval")),
        (COLLECTED | {"algorithm__filter_groups__enable": True, f"{ROLLOUT}n": 2}, ("filter_groups", "s3://t", "null")),
        (ASYNC | {f"{AGENT}num_env_hosts": 2}, ("num_env_hosts=2", "no episode asks", "agent.kwargs.environment")),
        (ASYNC | ENVIRONMENT | {f"{AGENT}env_host_gpus": 1.5}, ("env_host_gpus=1.5", "set 1 or 2")),
        (ASYNC | {f"{ROLLOUT}n": 4, f"{AGENT}min_samples": 5}, ("min_samples=5", "rollout.n=4", "whole groups", "null")),
        (ASYNC | {f"{ROLLOUT}weights": "memory", f"{ROLLOUT}weights_folder": "w"}, ("weights=memory", "weights=folder", "null")),
        ({f"{ROLLOUT}min_replicas": 1}, ("min_replicas=1 with", "mode=sync", "number is fixed", "null, or set", "mode=async")),
        (PAIR | {f"{ROLLOUT}min_replicas": 2, f"{ROLLOUT}max_replicas": 1}, ("min_replicas=2 is more than", "max_replicas=1")),
        (PAIR | {f"{ROLLOUT}max_replicas": 3}, ("max_replicas=3", "holds 2 replicas (1 machines x trainer.pools.gen", "3 ranks")),
        (
            PAIR | {f"{ROLLOUT}max_replicas": 2, f"{ROLLOUT}tensor_model_parallel_size": 2},
            ("holds 1 replicas", "n_gpus_per_node=2 / actor_rollout_ref.rollout.tensor_model_parallel_size=2", "2 need 4 ranks"),
        ),
        ({"trainer__replay_from": "x", "trainer__test_freq": 5}, ("test_freq=5", "main_eval")),
        ({"trainer__replay_from": "x", "trainer__record_batches": True}, ("recorded already",)),
    ],
)
def test_what_cannot_start(values: dict[str, object], parts: tuple[str, ...]) -> None:
    (problem,) = checks.check(good(**values))
    assert all(part in problem for part in parts), problem


def test_environment_hosts_serve_a_workflow_that_asks_for_environments() -> None:
    """What they reserve is read by Ray."""
    reserved = {f"{AGENT}env_host_cpus": 2.0}
    own = {f"{AGENT}num_env_hosts": 2, f"{AGENT}default_agent_loop": "mine.py:Mine"}
    for values, why in (
        (ENVIRONMENT, None),
        (own, None),
        (ENVIRONMENT | {"trainer__backend": "local"}, "backend=local reserves nothing"),
        ({}, "num_env_hosts is 0"),
    ):
        config = good(**ASYNC, **reserved, **values)
        assert checks.check(config) == []
        warned = [text for text in effects.without_effect(config, {CPUS}) if CPUS in text]
        assert len(warned) == (why is not None) and all(str(why) in text for text in warned), warned


@pytest.mark.parametrize(("n", "least"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (8, 4), (16, 8)])
def test_half_of_a_group_is_enough_and_two_where_there_are_two(n: int, least: int) -> None:
    assert good(**ASYNC | {f"{ROLLOUT}n": n}).actor_rollout_ref.rollout.agent.min_samples == least


def test_a_last_sample_is_compared_with_nothing() -> None:
    values = ASYNC | {f"{ROLLOUT}n": 4, f"{AGENT}min_samples": 1}
    (problem,) = checks.check_requirements(good(**values), {"groups"})
    assert "min_samples=1" in problem and "2 or more" in problem
    assert checks.check_requirements(good(**values), set()) == []
    assert checks.check_requirements(good(**values | {f"{AGENT}min_samples": 2}), {"groups"}) == []


def test_replicas_may_be_tensor_parallel() -> None:
    values = ASYNC | {f"{ROLLOUT}tensor_model_parallel_size": 2}
    assert checks.check(good(**values, trainer__n_gpus_per_node=2)) == []
    (problem,) = checks.check(good(**values, trainer__n_gpus_per_node=3))
    assert "3 = 1 x 2 + 1" in problem


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm__rollout_correction__rollout_is": "token"},
        {"algorithm__rollout_correction__bypass_mode": True},
        {"algorithm__rollout_correction__proximal": "a3po"},
        {"algorithm__rollout_correction__m2po_threshold": 0.04},
    ],
)
def test_correcting_old_samples_takes_any_correction(values: dict[str, object]) -> None:
    assert checks.check(good(**ASYNC, trainer__stale_policy="correct", trainer__max_staleness=2, **values)) == []


def test_what_another_job_collects_takes_no_processes_here() -> None:
    assert checks.check(good(**COLLECTED)) == []
    key = "actor_rollout_ref.rollout.agent.num_workers"
    values = {f"{ROLLOUT}agent__num_workers": 2}
    (warning,) = effects.without_effect(good(**COLLECTED, **values), {key})
    assert key in warning and "trajectories_folder is set" in warning
    assert effects.without_effect(good(**ASYNC, **values), {key}) == []


def test_a_collecting_job_paces_itself() -> None:
    values = {"trainer__pacing": "fixed"}
    for config, num in ((good(**COLLECTED, **values), 1), (good(**values), 1), (good(**ASYNC, **values), 0)):
        assert len(effects.without_effect(config, {"trainer.pacing"})) == num


def test_a_greedy_baseline_is_not_collected_by_another_job() -> None:
    (problem,) = checks.check_requirements(good(**COLLECTED), {"baseline_rewards"})
    assert "trajectories_folder=s3://t" in problem and "greedy" in problem
    assert checks.check_requirements(good(**ASYNC), {"baseline_rewards"}) == []


def test_notes() -> None:
    assert asynchronous.notes(good(**ASYNC, trainer__max_staleness=0)) == []
    assert asynchronous.notes(good(**ASYNC, trainer__max_staleness=2, **CORRECTED)) == []
    (uncorrected,) = asynchronous.notes(good(**ASYNC, trainer__max_staleness=2))
    assert "rollout_is=token" in uncorrected
    (deep,) = asynchronous.notes(good(**ASYNC, trainer__max_staleness=2, trainer__pipeline_depth=3, **CORRECTED))
    assert "pipeline_depth=3" in deep and "2 batches" in deep
    (none,) = asynchronous.notes(good(**ASYNC, trainer__max_staleness=2, trainer__pipeline_depth=0, **CORRECTED))
    assert "pipeline_depth=0" in none


def test_interpolated_log_probs_are_what_stale_batches_are_for() -> None:
    """The note that a synchronous run never clips is silent where samples may be old."""
    a3po = {"algorithm__rollout_correction__proximal": "a3po", **CORRECTED}
    assert any("no clip" in note for note in checks.notes(good(**a3po)))
    assert not any("no clip" in note for note in checks.notes(good(**ASYNC, trainer__max_staleness=2, **a3po)))


def test_settings_of_the_service_have_no_effect_without_it() -> None:
    values = {"trainer__stale_policy": "mask", "actor_rollout_ref__rollout__agent__num_workers": 2}
    keys = {"trainer.stale_policy", "actor_rollout_ref.rollout.agent.num_workers"}
    assert len(effects.without_effect(good(**values), keys)) == 2
    assert effects.without_effect(good(**ASYNC, **values), keys) == []
    assert checks.check(good(**ASYNC, **values)) == []


def test_replicas_follow_the_queue_within_the_pool() -> None:
    for values in ({"min_replicas": 1}, {"max_replicas": 2}, {"min_replicas": 1, "max_replicas": 2}, {"min_replicas": 2}):
        assert checks.check(good(**PAIR | {f"{ROLLOUT}{name}": number for name, number in values.items()})) == []
    unread = good(**COLLECTED | {f"{ROLLOUT}max_replicas": 1})
    key = "actor_rollout_ref.rollout.max_replicas"
    assert [text for text in effects.without_effect(unread, {key}) if key in text and "has no effect" in text]
