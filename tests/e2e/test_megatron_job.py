"""The main job with Megatron-core on two ranks learns what FSDP2 learns on one: the same command but for the strategy and the
sizes, and the same numbers in every step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Mains, Result, Task
from tests.support.metrics import rows_of

RAY_TIMEOUT_S = 500.0
"""Of one run: a quarter of a minute when nothing else runs."""

TWO_RANKS = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.ray_init.object_store_memory=300000000")
ACTOR = "actor_rollout_ref.actor"
VARYING = ("timing_", "perf/", "memory/", "mismatch/")
COUNTED = ("critic/vf_clipfrac", "actor/pg_clipfrac")
"""Shares of tokens beyond a bound: one token at the bound may fall to either side."""
LARGEST_MISMATCH = 1e-5
NUM_STEPS = 2

PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.9",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.kl_coef=0.1",
    f"{ACTOR}.ppo_mini_batch_size=4",
    "critic.optim.lr=1e-3",
)


def finished(result: Result) -> None:
    assert result.code == 0 and "Traceback" not in result.output, result.output


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what no two runs share; every number is finite."""
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if not isinstance(value, str)), row
        assert abs(row["mismatch/kl"]) < LARGEST_MISMATCH, "the rollout engine has the trainer's weights"
    return [{name: value for name, value in row.items() if not name.startswith(VARYING)} for row in rows]


@pytest.mark.parametrize(
    ("algorithm", "cut"),
    [((), ("tensor_model_parallel_size=2",)), (PPO, ("pipeline_model_parallel_size=2",))],
    ids=["grpo-tensor-parallel", "ppo-pipeline-parallel"],
)
def test_two_megatron_ranks_learn_as_one_of_fsdp2(
    mains: Mains, task: Task, tmp_path: Path, algorithm: tuple[str, ...], cut: tuple[str, ...]
) -> None:
    """Both steps: the second starts from weights and optimizer state that the first has left behind."""
    common = (*algorithm, f"trainer.total_training_steps={NUM_STEPS}")
    one = mains.start(task.arguments(tmp_path / "fsdp2", *common))
    megatron = (*TWO_RANKS, f"{ACTOR}.strategy=megatron", *(f"{ACTOR}.megatron.{size}" for size in cut))
    two = mains.start(task.arguments(tmp_path / "megatron", *common, *megatron))
    finished(one.wait())
    finished(two.wait(RAY_TIMEOUT_S))
    assert two.leftovers() == []

    expected, got = steps_of(tmp_path / "fsdp2"), steps_of(tmp_path / "megatron")
    for got_row, expected_row in zip(got, expected, strict=True):
        counted = {name: (got_row.pop(name, None), expected_row.pop(name, None)) for name in COUNTED}
        assert got_row == pytest.approx(expected_row, rel=2e-3, abs=1e-5)
        assert all(mine == pytest.approx(theirs, abs=0.02) for mine, theirs in counted.values())
    first, second = expected
    assert first != pytest.approx(second, rel=2e-3, abs=1e-5), "a step left out would be noticed"
    assert first["actor/grad_norm"] > 0.0
    assert (tmp_path / "megatron" / f"global_step_{NUM_STEPS}" / "actor" / "huggingface").is_dir()
