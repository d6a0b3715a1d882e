"""Pools and placement: what is wrong is said before anything starts, with the arithmetic and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from rlhub.config.aliases import translate as foreign
from rlhub.config.load import collect
from rlhub.config.rules import checks
from rlhub.config.rules.derive import derive
from rlhub.config.rules.placement import on_machine, pool_name, pool_of, pools_of, unneeded
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.sft import SFTConfig
from tests.unit.config.rules.test_derive import good

ONE: dict[str, Any] = {"own": {}}
TENSOR_PARALLEL = {"actor_rollout_ref__rollout__tensor_model_parallel_size": 4}
REFERENCE = {"actor_rollout_ref__actor__use_kl_loss": True}


def placed(pools: dict[str, Any], placement: dict[str, Any], **more: object) -> PPOConfig:
    return good(trainer__pools=pools, trainer__placement=placement, **more)


@pytest.mark.parametrize(
    ("pools", "placement", "more"),
    [
        ({}, {}, {}),
        ({}, {"critic": "main"}, {}),
        ({"gen": {"n_gpus_per_node": 4, "nnodes": 2}}, {"rollout": "gen"}, TENSOR_PARALLEL),
        ({"a": {}, "b": {}}, {"critic": "a", "reference": "b", "rollout": "b"}, REFERENCE),
    ],
)  # fmt: skip
def test_good_placements_pass(pools: dict[str, Any], placement: dict[str, Any], more: dict[str, Any]) -> None:
    assert checks.check(placed(pools, placement, **more)) == []


@pytest.mark.parametrize(
    ("pools", "placement", "more", "parts"),
    [
        (ONE, {"rolout": "own"}, {}, ["trainer.placement.rolout: no such role; did you mean 'rollout'?", "known: rollout, ref"]),
        (ONE, {"actor": "own"}, {}, ["trainer.placement.actor: the actor is always on the main pool"]),
        (ONE, {"critic": "onw"}, {}, ["trainer.placement.critic=onw: no such pool; did you mean 'own'? known: main, own"]),
        (ONE, {}, {}, ["trainer.pools.own: no role is placed there"]),
        ({"own": 2}, {"critic": "own"}, {}, ["trainer.pools.own=2: expected a mapping of nnodes and n_gpus_per_node"]),
        ({"own": {"n_gpu_per_node": 2}}, {"critic": "own"}, {}, ["n_gpu_per_node: no such setting; did you mean 'n_gpus_per"]),
        ({"own": {"nnodes": 0}}, {"critic": "own"}, {}, ["trainer.pools.own.nnodes: got 0, expected int >= 1"]),
        ({"main": {}}, {"critic": "main"}, {}, ["trainer.pools.main: the main pool's size is trainer.nnodes x"]),
        (ONE, {"rollout": "own"}, {"trainer__backend": "local"}, ["trainer.backend=local", "use trainer.backend=ray"]),
        (ONE, {"reward_model": "own"}, {}, ["reward_model.enable is off"]),
        (ONE, {"judge": "own"}, {}, ["reward_model.judge.model.path is not set"]),
        (
            {"own": {"n_gpus_per_node": 3}},
            {"rollout": "own"},
            TENSOR_PARALLEL,
            ["does not divide trainer.pools.own.n_gpus_per_node=3: 3 = 0 x 4 + 3"],
        ),
        (
            {"own": {"n_gpus_per_node": 3}},
            {"critic": "own"},
            {"actor_rollout_ref__actor__fsdp_config__fsdp_size": 2, "trainer__n_gpus_per_node": 2},
            ["critic.fsdp_config.fsdp_size=2 does not divide the 3 ranks of trainer.pools.own"],
        ),
        ({"own": {"n_gpus_per_node": 9999}}, {"rollout": "own"}, {}, ["cannot feed the 9999 engines of the rollout's pool"]),
        ({"own": {"n_gpus_per_node": 9999}}, {"critic": "own"}, {}, ["256 samples cannot feed the 9999 data-parallel ranks"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    pools: dict[str, Any], placement: dict[str, Any], more: dict[str, Any], parts: list[str]
) -> None:
    text = "\n".join(checks.check(placed(pools, placement, **more)))
    assert all(part in text for part in parts), text
    assert bool(text) == bool(parts)


def test_the_main_pool_may_be_too_small_for_what_has_left_it() -> None:
    assert "does not divide trainer.n_gpus_per_node=1" in "\n".join(checks.check(good(**TENSOR_PARALLEL)))
    assert checks.check(placed({"gen": {"n_gpus_per_node": 4}}, {"rollout": "gen"}, **TENSOR_PARALLEL)) == []


def test_a_critic_that_nobody_asks_is_refused() -> None:
    config = placed(ONE, {"critic": "own"})
    assert unneeded(config, frozenset({"values"})) == []
    (problem,) = unneeded(config, frozenset())
    assert "trainer.placement.critic=own, but algorithm.adv_estimator=" in problem and "has no critic" in problem


def test_a_reference_that_nobody_asks_is_refused() -> None:
    config = placed(ONE, {"reference": "own"}, actor_rollout_ref__ref__model__path="teacher")
    assert unneeded(config, frozenset({"values", "reference"})) == []
    (problem,) = unneeded(config, frozenset({"values"}))
    assert "trainer.placement.reference=own, but there is no reference without" in problem


def test_where_roles_live() -> None:
    config = placed({"own": {"n_gpus_per_node": 2, "nnodes": 3}}, {"critic": "own"}, trainer__n_gpus_per_node=4)
    assert list(pools_of(config.trainer)) == ["main", "own"]
    assert (pool_name(config.trainer, "critic"), pool_name(config.trainer, "rollout")) == ("own", "main")
    assert (pool_of(config.trainer, "critic").ranks, pool_of(config.trainer, "rollout").ranks) == (6, 4)


def test_all_pools_together_against_one_machine() -> None:
    config = placed({"own": {"n_gpus_per_node": 2}}, {"critic": "own"}, trainer__n_gpus_per_node=4)
    assert on_machine(config.trainer, 6) == []
    (problem,) = on_machine(config.trainer, 5)
    assert "4 (main) + 2 (own) = 6 GPUs, this machine has 5" in problem


def test_trainers_of_one_model_have_nothing_to_place() -> None:
    config = SFTConfig()
    config.trainer.device, config.trainer.pools = "cpu", {"own": {}}
    derive(config)
    assert any("there is one model, on all ranks" in problem for problem in checks.check(config))


def test_the_command_line_and_other_frameworks_keys() -> None:
    loaded = collect(PPOConfig, "ppo", ["trainer.pools.own.n_gpus_per_node=2", "trainer.placement.rollout=own"])
    assert loaded.problems == [] and loaded.config.trainer.pools == {"own": {"n_gpus_per_node": 2}}
    assert loaded.config.trainer.placement == {"rollout": "own"}
    off = ["reward_model.enable_resource_pool=false", "reward_model.n_gpus_per_node=0", "reward_model.nnodes=0"]
    assert collect(PPOConfig, "ppo", off).problems == []
    for key, role in (("reward_model.enable_resource_pool", "reward_model"), ("actor_rollout_ref.hybrid_engine", "rollout")):
        said = foreign.judge(key, key.startswith("reward_model"))
        assert said is not None and f"trainer.placement.{role}=NAME" in said
