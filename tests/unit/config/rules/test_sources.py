"""Sources and samplers: what is wrong is said before anything starts, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhub.config.rules import checks
from rlhub.config.rules.sources import SourceConfig, estimators_of, rewards_of, sources_of, val_sampling
from rlhub.config.sections.ppo import DataConfig
from tests.unit.config.rules.test_derive import good


def found(**more: Any) -> list[str]:
    return checks.check(good(**more))


def test_settings_are_typed_and_rewards_found_from_any_folder() -> None:
    data = DataConfig(sources={"a/b": {"weight": 3, "reward": "own.py:score"}, "c": {}})
    assert sources_of(data) == {"a/b": SourceConfig(weight=3.0, reward="own.py:score"), "c": SourceConfig()}
    assert rewards_of(data) == {"a/b": f"{Path('own.py').resolve()}:score"}
    assert found(data__sampler="mixture", data__sources={"a": {"weight": 3}}) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data__sources": {"a": 3}}, "data.sources.a=3: expected a mapping of weight, reward, agent_name"),
        (
            {"data__sources": {"a": {"wieght": 3}}},
            "data.sources.a.wieght: no such setting; did you mean 'weight'?; known: weight",
        ),
        ({"data__sources": {"a": {"weight": -1}}}, "data.sources.a.weight: got -1, expected number >= 0"),
        ({"data__sources": {"a": {"weight": 2}}}, "data.sampler=uniform: only mixture has shares; set data.sampler=mixture"),
        ({"data__sources": {"a": {"agent_name": "tool_agent"}}}, "rollout.mode=sync: workflows run on the rollout service"),
        ({"data__sources": {"a": {"reward": "no.py:f"}}}, "data.sources.a.reward=no.py:f: no such file"),
        (
            {"data__sources": {"a": {"val_kwargs": {"m": 2}}}},
            "data.sources.a.val_kwargs.m: no such setting; known: n, temperature",
        ),
        ({"data__sources": {"a": {"val_kwargs": {"n": 0}}}}, "data.sources.a.val_kwargs.n: got 0, expected int >= 1"),
        ({"data__sources": {"a": {"val_kwargs": {"n": 2}}}, "data__val_files": None}, "val_kwargs with data.val_files=null"),
        (
            {"data__sources": {"a": {"adv_estimator": "grpo"}}, "trainer__replay_from": "x"},
            "data.sources.a.adv_estimator with trainer.replay_from: recorded batches have no data_source",
        ),
        ({"data__sampler": "curriculum", "trainer__replay_from": "x"}, "recorded batches come in their own order"),
    ],
)
def test_what_is_wrong_is_named(more: dict[str, Any], message: str) -> None:
    problems = found(**more)
    assert any(message in problem for problem in problems), problems


def test_estimators_and_validation_of_a_source_are_what_differs_from_those_of_the_run() -> None:
    own = {
        "a": {"adv_estimator": "rloo", "val_kwargs": {"n": 4}},
        "b": {"adv_kwargs": {"norm_adv_by_std_in_grpo": False}},
        "c": {},
    }
    config = good(data__sources=own, algorithm__adv_estimator="grpo", algorithm__gamma=0.9, actor_rollout_ref__rollout__n=2)
    assert checks.check(config) == []
    found = {key: (one.adv_estimator, one.adv_kwargs, one.gamma) for key, one in estimators_of(config).items()}
    assert found == {
        "algorithm": ("grpo", {}, 0.9),
        "data.sources.a": ("rloo", {}, 0.9),
        "data.sources.b": ("grpo", {"norm_adv_by_std_in_grpo": False}, 0.9),
    }
    config.actor_rollout_ref.rollout.val_kwargs.top_p = 0.5
    assert (val_sampling(config, "a").n, val_sampling(config, "a").top_p) == (4, 0.5)
    assert val_sampling(config, "c").n == val_sampling(config, "unknown").n == 1
