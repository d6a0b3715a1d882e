"""Recipe embodied_reach from its command line: demonstrations, cloning, the choice of a weak clone, PPO in simulators."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from recipes.embodied_reach.run import ACTIONS
from rlhub.config.sections.vla import VLAConfig
from tests.e2e.conftest import Mains
from tests.e2e.test_recipes import IN_PROCESS, RECIPES, run_recipe
from tests.support.metrics import rows_of

pytestmark = pytest.mark.skipif(
    find_spec("mujoco") is None, reason="the extra 'envs' is not installed: bash scripts/setup_env.sh"
)
SHORT = (
    *IN_PROCESS,
    "env.val_scenes=16",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.test_freq=2",
)
CONTROLS = RECIPES / "embodied_reach" / "controls.py"


def test_the_recipe_runs_from_nothing(mains: Mains, tmp_path: Path) -> None:
    command = (str(RECIPES / "embodied_reach" / "run.py"), f"--out={tmp_path}", "--seed=3", "--ranks=1", "--steps=2")
    done = run_recipe(mains, mains.interpreter, *command, "--sft-steps=10", "--episodes=64", "--weak=0.0", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "ppo")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(
        0 <= row["val/success_low"] <= row["val/success"] <= row["val/success_high"] <= 1 for row in rows if "val/success" in row
    )
    assert all(row["rollout/lost_episodes"] == 0 and abs(row["mismatch/kl"]) < 1e-5 for row in rows[1:])
    shown = (tmp_path / "ppo" / "generations" / "val-000002.jsonl").read_text().splitlines()
    assert (
        all(json.loads(line)["extra"]["film"] for line in shown)
        and 'class="film"' in (tmp_path / "ppo" / "report.html").read_text()
    )

    name = f"env.name={CONTROLS}:OtherColor"
    settings = [
        f"actor_rollout_ref.model.vla={ACTIONS}",
        "actor_rollout_ref.rollout.name=hf",
        "data.max_response_length=4",
        "data.max_prompt_length=16",
    ]
    model = tmp_path / "ppo/global_step_2/actor/huggingface"
    evaluated = mains.run(
        [
            name,
            "env.val_scenes=16",
            f"actor_rollout_ref.model.path={model}",
            *settings,
            *IN_PROCESS,
            f"trainer.default_local_dir={tmp_path / 'other'}",
        ],
        module="rlhub.trainer.main_eval",
    )
    assert evaluated.code == 0 and "val/success" in evaluated.output, evaluated.output


def test_the_command_has_the_actions_of_the_demonstrations() -> None:
    from recipes.embodied_reach.demonstrations import VLA

    assert VLAConfig(**yaml.safe_load(ACTIONS)) == dataclasses.replace(VLA)
