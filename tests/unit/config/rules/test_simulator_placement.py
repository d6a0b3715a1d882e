"""Simulators: where they live and how far they run ahead, with the arithmetic and the remedy where that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from rlhub.config.rules import asynchronous, checks, effects
from rlhub.config.rules.placement import cpus_on_machine, on_machine, pools_of, pools_of_ranks
from rlhub.config.sections.ppo import PPOConfig
from tests.support.vla import settings
from tests.unit.config.rules.test_derive import good

EMBODIED = {
    "env__name": "reach_color",
    "data__train_files": None,
    "data__val_files": None,
    "data__train_batch_size": 8,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
    "actor_rollout_ref__rollout__name": "hf",
    "actor_rollout_ref__model__vla": settings(),
    "trainer__n_gpus_per_node": 2,
}
AHEAD = {"actor_rollout_ref__rollout__mode": "async", "trainer__max_staleness": 1}
CORRECTED = {"algorithm__rollout_correction__rollout_is": "token"}
GENERATION = {"trainer__pools": {"gen": {}}, "trainer__placement": {"rollout": "gen"}}


def embodied(**values: Any) -> PPOConfig:
    return good(**(EMBODIED | values))


def apart(processes: int, reserves: dict[str, float] | None = None, **values: Any) -> PPOConfig:
    pools, placement = {"sim": {"n_gpus_per_node": processes, **(reserves or {})}}, {"environments": "sim"}
    return embodied(**({"trainer__pools": pools, "trainer__placement": placement} | values))


@pytest.mark.parametrize("config", [embodied(), apart(2), apart(4, env__stages=2), apart(8, env__num_envs=4)])
def test_simulators_in_the_ranks_and_apart_pass(config: PPOConfig) -> None:
    assert checks.check(config) == []


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (apart(3), ["trainer.pools.sim: its 3 processes must be shared by 2 rollout ranks x env.stages=1: 3 = 2 x 1 + 1"]),
        (apart(2, env__stages=2), ["2 rollout ranks x env.stages=2: 2 = 4 x 0 + 2; set nnodes x n_gpus_per_node to a multiple"]),
        (
            apart(8, env__num_envs=3),
            ["a stage has 4 processes, but env.num_envs=3 / env.stages=1 = 3 environments", "to at least 4"],
        ),
        (
            apart(2, {"process_gpus": 1.5}),
            ["trainer.pools.sim.process_gpus=1.5: Ray gives parts of one GPU or whole ones; set 1 or 2"],
        ),
        (apart(2, trainer__controller="multi"), ["environments=sim with trainer.controller=multi"]),
        (
            apart(2, trainer__placement={"environments": "sim", "rollout": "sim"}),
            ["trainer.placement.rollout=sim too: simulators have a pool of their own"],
        ),
        (good(trainer__pools={"sim": {}}, trainer__placement={"environments": "sim"}), ["no simulators without env.name"]),
    ],
)
def test_what_does_not_fit_is_named(config: PPOConfig, parts: list[str]) -> None:
    text = "\n".join(checks.check(config))
    assert all(part in text for part in parts), text


def test_simulators_have_no_ranks_and_reserve_what_they_say() -> None:
    config = apart(4, {"process_gpus": 0.5, "process_cpus": 3.0})
    assert list(pools_of(config.trainer)) == ["main", "sim"] and list(pools_of_ranks(config.trainer)) == ["main"]
    assert on_machine(config.trainer, 4) == [] and on_machine(apart(4).trainer, 2) == []
    assert "2 (main) + 2 (sim) = 4 GPUs, this machine has 3" in on_machine(config.trainer, 3)[0]
    assert cpus_on_machine(config.trainer, 14) == []
    (problem,) = cpus_on_machine(config.trainer, 13)
    assert "4 processes x 3 + 2 ranks = 14 CPUs, and the cluster that is started here has 13" in problem
    config.trainer.ray_init = {"num_cpus": 14}
    assert cpus_on_machine(config.trainer, 13) == []


def test_only_simulators_reserve() -> None:
    config = good(trainer__pools={"own": {"process_cpus": 1}}, trainer__placement={"critic": "own"})
    assert "trainer.pools.own.process_cpus: only a pool of simulators reads it" in "\n".join(checks.check(config))


def test_episodes_run_ahead_on_a_pool_of_their_own() -> None:
    config = embodied(**AHEAD, **CORRECTED, **GENERATION, trainer__stale_policy="mask")
    assert checks.check(config) == []
    assert asynchronous.runs_ahead(config) and asynchronous.may_be_stale(config) and not asynchronous.is_async(config)
    found = "\n".join(effects.without_effect(config, {"trainer.stale_policy", "trainer.pipeline_depth"}))
    assert "trainer.stale_policy" in found and "pipeline_depth" not in found
    text = "\n".join(checks.check(embodied(**AHEAD)))
    assert "trainer.max_staleness=1 with env.name=reach_color: the actor's ranks cannot run episodes while they train" in text
    assert checks.check(embodied(actor_rollout_ref__rollout__mode="async")) == []
    assert "set actor_rollout_ref.rollout.mode=async" in "\n".join(checks.check(embodied(trainer__max_staleness=1)))
    assert "trainer.controller=multi with actor_rollout_ref.rollout.mode=async" in "\n".join(
        checks.check(embodied(**AHEAD, **GENERATION, trainer__controller="multi"))
    )
