"""Whole GRPO jobs whose reward is learned: a reward model, one beside a function, and a judge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Mains, Result, Task
from tests.support.chat_model import save_chat_model
from tests.support.metrics import rows_of
from tests.support.reward_models import save_reward_model

STEPS = 3
FUNCTION_OFF = "reward_model.function_weight=0"
SMALL_CLUSTER = "trainer.ray_init.object_store_memory=300000000"


@pytest.fixture(scope="module")
def models(task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reward models on the policy's tokens with opposite heads, one with a tokenizer of its own, and a chat model."""
    folder = tmp_path_factory.mktemp("models")
    chat = save_chat_model(folder / "chat")
    return {
        "reward": save_reward_model(folder / "reward", task.folder / "model"),
        "flipped": save_reward_model(folder / "flipped", task.folder / "model", sign=-1.0),
        "letters": save_reward_model(folder / "letters", chat),
        "chat": chat,
    }


def with_model(path: Path, *more: str) -> list[str]:
    return ["reward_model.enable=true", f"reward_model.model.path={path}", *more]


def run(mains: Mains, task: Task, folder: Path, *more: str) -> list[dict[str, Any]]:
    """A job of a few steps; the rows of its metrics, all finite."""
    result = mains.run(task.arguments(folder, f"trainer.total_training_steps={STEPS}", *more))
    assert result.code == 0, result.output
    assert "Traceback" not in result.output, result.output
    rows = rows_of(folder)
    assert all(math.isfinite(value) for row in rows for value in row.values() if not isinstance(value, str))
    return [row for row in rows if "actor/pg_loss" in row]


def test_a_reward_model_is_the_reward(mains: Mains, task: Task, models: dict[str, Path], tmp_path: Path) -> None:
    """No function runs: the one that is named would end the run.  A flipped head gives the reversed reward."""
    (tmp_path / "broken.py").write_text("raise SystemExit('imported')\ndef compute_score(*row): ...\n")
    broken = f"custom_reward_function.path={tmp_path / 'broken.py'}"
    rows = run(mains, task, tmp_path / "run", *with_model(models["reward"], FUNCTION_OFF, broken))
    assert len(rows) == STEPS
    for row in rows:
        assert row["reward/mean"] == pytest.approx(row["reward/model"], abs=1e-5)
        assert row["reward/num_failed"] == 0 and "reward/function" not in row and row["timing_s/compute_rm_score"] > 0
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    flipped = run(mains, task, tmp_path / "flipped", *with_model(models["flipped"], FUNCTION_OFF))
    assert flipped[0]["reward/model"] == pytest.approx(-rows[0]["reward/model"], abs=1e-6)  # the same first samples


def test_a_function_and_a_reward_model_are_weighted(mains: Mains, task: Task, models: dict[str, Path], tmp_path: Path) -> None:
    """Two ranks through Ray, with a critic beside; validation counts as correct what the function says."""
    more = with_model(models["reward"], "reward_model.weight=0.5", "reward_model.function_weight=2")
    validation = [f"data.val_files={task.folder / 'val.parquet'}", "trainer.test_freq=2", "algorithm.adv_estimator=gae"]
    ranks = ["trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", SMALL_CLUSTER]
    for row in run(mains, task, tmp_path / "run", *more, *validation, *ranks):
        expected = 2 * row["reward/function"] + 0.5 * row["reward/model"]
        assert row["reward/mean"] == pytest.approx(expected, abs=1e-5)
        assert 0 <= row["reward/function"] <= 1 and "critic/vf_loss" in row
    rows = rows_of(tmp_path / "run")
    last = [row for row in rows if "val/reward/mean" in row][-1]
    assert 0 <= last["val/pass@1"] <= 1
    logs = [path.name for path in (tmp_path / "run/logs").iterdir()]
    assert sorted(logs) == [f"actor_rollout_ref+critic+reward_model-rank{rank}.log" for rank in range(2)]


def test_another_tokenizer_reads_texts(mains: Mains, task: Task, models: dict[str, Path], tmp_path: Path) -> None:
    policy = f"reward_model.model.input_tokenizer={task.folder / 'model'}"
    rows = run(mains, task, tmp_path / "run", *with_model(models["letters"], FUNCTION_OFF, policy))
    assert all(row["actor/grad_norm"] > 0 for row in rows)


def test_evaluation_rewards_with_the_model_and_counts_by_the_function(
    mains: Mains, task: Task, models: dict[str, Path], tmp_path: Path
) -> None:
    """The reward model's weight moves the mean reward far and leaves pass@1 where it was."""
    found = {}
    for name, more in (("alone", []), ("both", with_model(models["reward"], "reward_model.weight=100"))):
        arguments = [
            f"data.val_files={task.folder / 'val.parquet'}",
            "data.max_prompt_length=8",
            "data.max_response_length=6",
            f"actor_rollout_ref.model.path={task.folder / 'model'}",
            "actor_rollout_ref.rollout.name=hf",
            f"custom_reward_function.path={task.folder / 'reward.py'}",
            "trainer.device=cpu",
            "trainer.backend=local",
            f"trainer.default_local_dir={tmp_path / name}",
        ]
        result = mains.run([*arguments, *more], module="rlhub.trainer.main_eval")
        assert result.code == 0, result.output
        (found[name],) = rows_of(tmp_path / name)
    assert found["both"]["val/pass@1"] == found["alone"]["val/pass@1"]
    assert abs(found["both"]["val/reward/mean"] - found["alone"]["val/reward/mean"]) > 10


def judge(models: dict[str, Path], *more: str) -> list[str]:
    return [
        f"reward_model.judge.model.path={models['chat']}",
        "reward_model.judge.max_prompt_length=200",
        "reward_model.judge.max_tokens=6",
        "reward_model.judge.temperature=1",
        "reward_model.judge.prompt_template='Rate {response} as an answer to {question}, which is {ground_truth}.'",
        *more,
    ]


def test_a_judge_whose_words_are_read(mains: Mains, task: Task, models: dict[str, Path], tmp_path: Path) -> None:
    """A random model writes random letters: the pattern takes one digit anywhere, what has none is unreadable and counted."""
    digits = judge(
        models, r"reward_model.judge.score_pattern='([0-9])'", "reward_model.judge.n=8", "reward_model.judge.weight=0.25"
    )
    lenient = ["reward_model.on_error=zero", "reward_model.max_error_rate=1"]
    rows = run(mains, task, tmp_path / "run", *digits, *lenient)
    for row in rows:
        assert 0 < row["reward/judge_unreadable_share"] < 1
        assert row["reward/judge_num_unreadable"] == row["reward/judge_unreadable_share"] * 8 * 16
        assert 0 <= row["reward/judge"] <= 9 and row["timing_s/generate_judgements"] > 0
        scored = 1 - row["reward/failed_share"]
        assert row["reward/mean"] == pytest.approx(row["reward/function"] + 0.25 * row["reward/judge"] * scored, abs=1e-5)


def test_a_judge_nobody_can_read_stops_the_run(mains: Mains, task: Task, models: dict[str, Path], tmp_path: Path) -> None:
    result: Result = mains.run(task.arguments(tmp_path / "run", FUNCTION_OFF, *judge(models)))
    assert result.code != 0 and "Traceback" not in result.output
    assert "the judge part of the reward" in result.output and "reward_model.max_error_rate=0.1" in result.output
    assert "judge.score_pattern" in result.output


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["reward_model.enable=true", "reward_model.model.path=./nowhere"], "no such folder"),
        (["reward_model.enable=true", "reward_model.model.path={letters}"], "another vocabulary"),
        (["reward_model.judge.model.path={chat}", "reward_model.judge.prompt_template='{{question}}'"], "has no {response}"),
    ],
)
def test_what_cannot_score_is_said_before_the_start(
    mains: Mains, task: Task, models: dict[str, Path], tmp_path: Path, settings: list[str], said: str
) -> None:
    named = [setting.format(**models) for setting in settings]
    result = mains.run(task.arguments(tmp_path / "run", *named))
    assert result.code != 0 and said in result.output and "Traceback" not in result.output
    assert not list((tmp_path / "run").glob("logs/*"))
