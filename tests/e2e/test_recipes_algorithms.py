"""Each family's recipe runs as its documentation says: a few steps on the quickstart's task, and what is the family's shows."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipes.arithmetic.run import parse, sft_settings
from recipes.stages import CHECKPOINTED_MODEL
from tests.e2e.conftest import Mains
from tests.e2e.test_recipes import IN_PROCESS, RECIPES, run_recipe
from tests.support.metrics import rows_of

FAMILIES = ("dapo", "gspo", "cispo", "remax", "ppo", "custom_advantage")
STEPS = 3


@pytest.fixture(scope="module")
def out(mains: Mains, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, model and a short warm start, which all families share; in process, for Ray is not what is tested here."""
    folder = tmp_path_factory.mktemp("families")
    for script, name in (("generate.py", "data"), ("build_model.py", "model")):
        command = (str(RECIPES / "arithmetic" / script), "--seed=3", f"--out={folder / name}")
        done = run_recipe(mains, mains.interpreter, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    settings = sft_settings(parse(common(folder)))
    trained = mains.run([*settings, "trainer.device=cpu", "trainer.backend=local"], module="rlhub.trainer.main_sft")
    assert trained.code == 0, trained.output
    return folder


def common(out: Path) -> list[str]:
    """Options of every stage."""
    return [f"--out={out}", "--seed=3", "--ranks=1", "--sft-steps=100"]


def run(mains: Mains, out: Path, script: Path, *more: str) -> subprocess.CompletedProcess[str]:
    quick = (*IN_PROCESS, "trainer.test_freq=-1", "trainer.val_before_train=False")
    return run_recipe(mains, mains.interpreter, str(script), *common(out), *quick, *more)


def check_dapo(rows: list[dict[str, Any]]) -> None:
    """Groups without signal were drawn and left out, and the batch is full."""
    assert all(row["groups/num"] == 32.0 and row["groups/all_equal"] == 0.0 for row in rows)
    assert any(row["sampling/share_filtered"] > 0 for row in rows) and all(row["sampling/num_filled"] == 0 for row in rows)
    assert all(row["reward/overlong_reward"] <= 0 and row["actor/optimizer_steps"] == 2.0 for row in rows)


def check_gspo(rows: list[dict[str, Any]]) -> None:
    """Sequence ratios leave the narrow band from the second optimizer step on."""
    assert all(row["actor/optimizer_steps"] == 4.0 and 0 < row["actor/pg_clipfrac"] < 1 for row in rows)


def check_cispo(rows: list[dict[str, Any]]) -> None:
    assert all(row["actor/optimizer_steps"] == 4.0 and 0 <= row["actor/pg_clipfrac"] < 0.5 for row in rows)


def check_remax(rows: list[dict[str, Any]]) -> None:
    """The greedy response is mostly right here, for the warm start's slips are noise: samples fall short of it, none by more
    than the whole reward."""
    assert all(row["reward/greedy_mean"] > row["reward/mean"] for row in rows)
    assert all(row["critic/advantages/min"] == -1.0 and row["critic/advantages/max"] <= 1.0 for row in rows)
    assert "critic/vf_loss" not in rows[0]


def check_ppo(rows: list[dict[str, Any]]) -> None:
    """The critic alone in the first steps; the KL's weight moves."""
    assert ["actor/pg_loss" in row for row in rows] == [False, False, False, True]
    assert all(row["critic/vf_loss"] > 0 for row in rows)
    assert len({row["actor/reward_kl_penalty_coeff"] for row in rows}) == len(rows)


def check_custom_advantage(rows: list[dict[str, Any]]) -> None:
    """The estimator's own metric and the reward's second number; no advantage is below half of what eight samples can have."""
    assert all(0 < row["advantages/blamed_share"] < 1 and row["reward/numbers"] > 1 for row in rows)
    assert all(-7 / 8**0.5 / 2 < row["critic/advantages/min"] < 0 for row in rows)


CHECKS = {
    "dapo": check_dapo,
    "gspo": check_gspo,
    "cispo": check_cispo,
    "remax": check_remax,
    "ppo": check_ppo,
    "custom_advantage": check_custom_advantage,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_recipe(mains: Mains, out: Path, family: str) -> None:
    steps = STEPS + 1 if family == "ppo" else STEPS
    done = run(mains, out, RECIPES / family / "run.py", f"--steps={steps}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has no effect" not in done.stderr, "every setting of the recipe is read"
    rows = rows_of(out / family)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["actor/grad_norm"] > 0 for row in rows if "actor/grad_norm" in row)
    CHECKS[family](rows)
    if family != "dapo":  # the control: the check sees another family's run for what it is
        with pytest.raises((AssertionError, KeyError)):
            check_dapo(rows)


def test_the_example_for_a_cpu_runs_as_it_is(mains: Mains, out: Path, tmp_path: Path) -> None:
    """trainer_configs/examples/tiny_cpu on this data and warm start, in process and for two steps."""
    files = [f"data.train_files={out / 'data/train.parquet'}", f"data.val_files={out / 'data/val.parquet'}"]
    model = f"actor_rollout_ref.model.path={out / 'sft/global_step_100' / CHECKPOINTED_MODEL}"
    reward = f"custom_reward_function.path={RECIPES / 'arithmetic/reward.py'}"
    short = ["trainer.total_training_steps=2", "trainer.test_freq=2", f"trainer.default_local_dir={tmp_path / 'run'}"]
    done = mains.run(["--config-name=examples/tiny_cpu", *files, model, reward, *IN_PROCESS, *short])
    assert done.code == 0, done.output
    assert [row["step"] for row in rows_of(tmp_path / "run") if "val/pass@1" in row] == [0, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_readme_says_what_the_script_sets(family: str) -> None:
    """Every setting stands in the README with its reason, and the command is there."""
    text = (RECIPES / family / "README.md").read_text()
    script = (RECIPES / family / "run.py").read_text()
    assert f"python recipes/{family}/run.py" in text
    for key, value in re.findall(r'^    "([a-z_.]+)=([^"]+)",$', script, flags=re.MULTILINE):
        assert f"`{key.rpartition('.')[2]}={value}`" in text, f"{key}={value}"
    assert "not been run" in text or "not measured" in text, "the full-size command is marked"
