"""The recipes on preference pairs, a few steps each, from data to evaluation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from tests.e2e.conftest import Mains
from tests.e2e.test_recipes import RECIPES, run_recipe
from tests.support.metrics import rows_of

IN_PROCESS = ("--ranks=1", "--sft-steps=2", "--steps=2", "trainer.device=cpu", "trainer.backend=local")


@pytest.fixture(scope="module")
def out(mains: Mains, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both recipes share data, model and pairs; the model as it is built stands in for the warm start."""
    folder = tmp_path_factory.mktemp("preference")
    build = [mains.interpreter, str(RECIPES / "arithmetic" / "build_model.py"), "--out", str(folder / "model")]
    assert run_recipe(mains, *build).returncode == 0
    shutil.copytree(folder / "model", folder / "sft" / "global_step_2" / "model" / "huggingface")
    return folder


def test_dpo(mains: Mains, out: Path) -> None:
    done = run_recipe(mains, mains.interpreter, str(RECIPES / "dpo" / "run.py"), f"--out={out}", *IN_PROCESS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out / "dpo")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["val/accuracy"] == 0.5 and rows[-1]["val/loss"] < rows[0]["val/loss"]
    before, after = (rows_of(out / name)[0]["val/pass@1"] for name in ("before", "dpo_after"))
    assert f"right answers: {before:.3f} before, {after:.3f} after" in done.stderr
    assert str(out / "dpo" / "report.html") in done.stderr


def test_reward_model(mains: Mains, out: Path) -> None:
    script = str(RECIPES / "reward_model" / "run.py")
    more = ("--rm-steps=2", "actor_rollout_ref.rollout.name=hf", "data.train_batch_size=8", "trainer.test_freq=-1")
    small = ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.val_before_train=False")
    done = run_recipe(mains, mains.interpreter, script, f"--out={out}", *IN_PROCESS, *more, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    model = AutoModelForSequenceClassification.from_pretrained(out / "rm" / "global_step_2" / "model" / "huggingface")
    assert model.config.num_labels == 1
    rows = rows_of(out / "grpo_rm")
    assert [row["step"] for row in rows] == [1, 2] and all(row["critic/score/max"] != row["critic/score/min"] for row in rows)
    assert all(score not in (0.0, 1.0) for row in rows for score in (row["critic/score/max"], row["critic/score/min"])), (
        "scores are the reward model's, not the rule's"
    )
    assert "by the rule that training never saw" in done.stderr
    assert (out / "grpo_rm_after" / "metrics.jsonl").is_file()
