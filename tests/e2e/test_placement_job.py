"""Placement from the command line: what cannot be is refused at once, and a killed rank of another pool ends the run cleanly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Mains, Task
from tests.support.metrics import rows_so_far
from tests.support.reward_models import save_reward_model

SMALL_CLUSTER = "trainer.ray_init.object_store_memory=300000000"
ROLLOUT_APART = ("trainer.pools.generation.n_gpus_per_node=2", "trainer.placement.rollout=generation")
RAY_TIMEOUT_S = 500.0
"""Of one run with three processes: a quarter of a minute when nothing else runs."""


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["trainer.placement.rolout=generation"], ["trainer.placement.rolout: no such role; did you mean 'rollout'?"]),
        (list(ROLLOUT_APART), ["trainer.backend=local", "use trainer.backend=ray"]),
        (
            [
                "trainer.backend=ray",
                *ROLLOUT_APART,
                "trainer.pools.idle.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
            ],
            ["trainer.pools.idle: no role is placed there"],
        ),
        (
            ["trainer.backend=ray", "trainer.pools.own.n_gpus_per_node=1", "trainer.placement.critic=own"],
            ["trainer.placement.critic=own, but algorithm.adv_estimator=grpo has no critic"],
        ),
    ],
)
def test_bad_placements_are_refused_before_anything_starts(
    mains: Mains, task: Task, tmp_path: Path, settings: list[str], parts: list[str]
) -> None:
    running = mains.start(task.arguments(tmp_path / "run", *settings))
    result = running.wait()
    assert result.code == 2 and all(part in result.output for part in parts), result.output
    assert not (tmp_path / "run").exists() and running.leftovers() == []


def test_a_killed_rollout_rank_ends_the_run(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Two rollout ranks of their own.  One is killed in the middle of training: an error that names it, nothing left behind."""
    folder = tmp_path / "run"
    arguments = task.arguments(
        folder, *ROLLOUT_APART, "trainer.backend=ray", SMALL_CLUSTER, "trainer.total_training_steps=100000"
    )
    running = mains.start(arguments)
    running.until(lambda: len(rows_so_far(folder)) >= 2, "two steps", RAY_TIMEOUT_S)
    rows = rows_so_far(folder)
    assert all(abs(row["mismatch/kl"]) < 1e-5 for row in rows), "the engines have the weights of the step before"
    victim = running.writer("rollout-rank1.log")
    victim.kill()
    result = running.wait(RAY_TIMEOUT_S)  # the deadlines of calls are longer
    assert result.code == 1 and "[rollout rank 1 on 127.0.0.1]" in result.output and f"process {victim.pid} died" in result.output
    assert running.leftovers() == []


def test_the_minimal_recipe_scores_with_a_reward_model(mains: Mains, task: Task, tmp_path: Path) -> None:
    """The recipe's own loop, whose workers then include the reward model."""
    reward = save_reward_model(tmp_path / "reward", task.folder / "model")
    settings = ["reward_model.enable=true", f"reward_model.model.path={reward}", "reward_model.function_weight=0"]
    arguments = task.arguments(tmp_path / "run", *settings, "trainer.total_training_steps=2")
    result = mains.run(arguments, module="recipes.minimal_grpo.grpo", env={"PYTHONPATH": str(ROOT)})
    assert result.code == 0 and "step 2 reward" in result.output, result.output
