"""Whole jobs with dynamic sampling, the greedy baseline, and all of PPO: warm-up of the critic and the adaptive coefficient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import Mains, Task
from tests.e2e.test_kill_and_resume import STEPS, run_killed
from tests.support.metrics import rows_of

FIRST_WORD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    words = solution_str.split()
    right = bool(words) and words[0][-1:] in "02468"
    return {"score": 1.0 if right else -1.0, "acc": right, "words": len(words)}
"""
"""Two samples agree about every other time."""


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder) if row["step"] > 0]


@pytest.fixture(scope="module")
def right_or_wrong(task: Task) -> str:
    path = task.folder / "first_word.py"
    path.write_text(FIRST_WORD)
    return f"custom_reward_function.path={path}"


# Dynamic sampling


def filtering(task: Task, folder: Path, reward: str, *more: str) -> list[str]:
    settings = ("algorithm.filter_groups.enable=True", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.save_freq=1")
    return task.arguments(folder, reward, *settings, *more)


def test_batches_are_full_of_groups_with_signal_and_a_killed_run_draws_the_same(
    mains: Mains, task: Task, right_or_wrong: str, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = mains.run(filtering(task, whole, right_or_wrong))
    assert done.code == 0, done.output
    expected, rows = outcome_of(whole), metrics_of(whole)
    assert all(row["groups/all_equal"] == 0.0 and row["sampling/num_filled"] == 0.0 for row in rows)
    assert all(row["groups/num"] == 8.0 and row["actor/optimizer_steps"] == 2.0 for row in rows)
    draws = [row["sampling/num_gen_batches"] for row in rows]
    assert max(draws) > 1 and all(row["sampling/num_prompts_generated"] == 8 * row["sampling/num_gen_batches"] for row in rows)
    assert all(0.0 < row["sampling/share_filtered"] < 1.0 for row in rows)
    loader = json.loads((whole / f"global_step_{STEPS}" / "trainer.json").read_text())["loader"]
    assert loader["consumed"] == 8 * sum(draws) and loader["epoch"] >= 1  # three batches an epoch

    arguments = filtering(task, killed, right_or_wrong)
    for operation, nth in [("rename .saving_global_step_1", 1), ("open metrics.jsonl", 2)]:
        assert run_killed(mains, arguments, killed, {"operation": operation, "nth": nth})
    assert not run_killed(mains, arguments, killed, {})
    assert outcome_of(killed)[0] == expected[0]
    assert {name for name in expected[1] if expected[1][name] != outcome_of(killed)[1][name]} == set()


def outcome_of(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Metrics less timings, and every tensor file of the last checkpoint."""
    varying = ("timing_", "perf/", "memory/")
    rows = [{name: value for name, value in row.items() if not name.startswith(varying)} for row in metrics_of(folder)]
    last = folder / f"global_step_{STEPS}"
    return rows, {str(path.relative_to(last)): path.read_bytes() for path in sorted(last.rglob("*.safetensors"))}


def test_the_bound_fills_the_batch_and_says_so(mains: Mains, task: Task, right_or_wrong: str, tmp_path: Path) -> None:
    """The control of the test above: with one generation a step, groups without signal are in the batch."""
    bound = ("algorithm.filter_groups.max_num_gen_batches=1", "algorithm.filter_groups.metric=acc")
    done = mains.run(filtering(task, tmp_path, right_or_wrong, *bound))
    assert done.code == 0, done.output
    rows = metrics_of(tmp_path)
    assert all(row["sampling/num_gen_batches"] == 1.0 and row["groups/num"] == 8.0 for row in rows)
    assert all(row["groups/all_equal"] == row["sampling/num_filled"] / 8 for row in rows) and rows[0]["sampling/num_filled"] > 0
    assert "dynamic sampling: after 1 generations" in done.output


def test_an_unknown_metric_ends_the_run_with_the_names_there_are(
    mains: Mains, task: Task, right_or_wrong: str, tmp_path: Path
) -> None:
    done = mains.run(filtering(task, tmp_path, right_or_wrong, "algorithm.filter_groups.metric=word"))
    assert done.code not in (0, None) and "did you mean 'words'" in done.output and "known: seq_reward" in done.output


# PPO


PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "trainer.save_freq=1")


def weights(folder: Path, role: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted((folder / role).rglob("*.safetensors")):
        if "optim" not in path.name:
            found |= {f"{path.parent.name}/{name}": tensor for name, tensor in load_file(path).items()}
    assert found
    return found


def moved(before: dict[str, Any], after: dict[str, Any]) -> bool:
    assert before.keys() == after.keys()
    return any(not before[name].equal(after[name]) for name in before)


def test_while_the_critic_warms_up_the_policy_and_its_version_stay(mains: Mains, task: Task, tmp_path: Path) -> None:
    done = mains.run(task.arguments(tmp_path, *PPO, "trainer.critic_warmup=2"))
    assert done.code == 0, done.output
    actor = [weights(tmp_path / f"global_step_{step}", "actor/huggingface") for step in range(1, STEPS + 1)]
    critic = [weights(tmp_path / f"global_step_{step}", "critic") for step in range(1, STEPS + 1)]
    assert [moved(*pair) for pair in zip(actor, actor[1:], strict=False)] == [False, True, True]
    assert [moved(*pair) for pair in zip(critic, critic[1:], strict=False)] == [True, True, True]
    start = load_file(task.folder / "model" / "model.safetensors")
    assert all(actor[0][f"huggingface/{name}"].equal(tensor) for name, tensor in start.items())
    rows = metrics_of(tmp_path)
    assert [row["training/policy_version"] for row in rows] == [0.0, 0.0, 3.0, 4.0]
    assert ["actor/pg_loss" in row for row in rows] == [False, False, True, True]
    assert all(row["critic/vf_loss"] > 0 for row in rows)


def follow(rows: list[dict[str, Any]], *, start: float, target: float, horizon: int, samples: int) -> list[float]:
    """The coefficient before each step, from the KL that the steps measured (arXiv 1909.08593, section 2.2)."""
    coefficients = [start]
    for row in rows[:-1]:
        error = min(max(row["actor/reward_kl_penalty"] / target - 1, -0.2), 0.2)
        coefficients.append(coefficients[-1] * (1 + error * samples / horizon))
    return coefficients


def test_the_adaptive_coefficient_follows_the_measured_kl_over_a_resume(mains: Mains, task: Task, tmp_path: Path) -> None:
    control = {"start": 0.3, "target": 0.001, "horizon": 40, "samples": 16}
    settings = (
        *PPO, "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive",
        f"algorithm.kl_ctrl.kl_coef={control['start']}", f"algorithm.kl_ctrl.target_kl={control['target']}",
        f"algorithm.kl_ctrl.horizon={control['horizon']}",
    )  # fmt: skip
    assert mains.run(task.arguments(tmp_path, *settings, "trainer.total_training_steps=2")).code == 0
    resumed = mains.run(task.arguments(tmp_path, *settings))
    assert resumed.code == 0 and "continuing at step 3" in resumed.output, resumed.output
    rows = metrics_of(tmp_path)
    told = [row["actor/reward_kl_penalty_coeff"] for row in rows]
    assert told == pytest.approx(follow(rows, **control), rel=1e-9)  # type: ignore[arg-type]
    assert told[0] == control["start"] and len(set(told)) == STEPS
    started_anew = [*told[:2], control["start"], told[3]]
    assert started_anew != pytest.approx(follow(rows, **control), rel=1e-9)  # type: ignore[arg-type]
