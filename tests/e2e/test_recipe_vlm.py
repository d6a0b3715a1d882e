"""Recipe vlm_count from its command line on two ranks: warm start and GRPO on pictures, then evaluation of what it saved."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import Mains
from tests.e2e.test_recipes import IN_PROCESS, RECIPES, run_recipe
from tests.support.metrics import rows_of


def test_the_recipe_runs_from_nothing(mains: Mains, tmp_path: Path) -> None:
    small = ("actor_rollout_ref.rollout.n=4", "trainer.val_before_train=false")
    command = (str(RECIPES / "vlm_count" / "run.py"), f"--out={tmp_path}", "--seed=3", "--steps=2", "--sft-steps=3", *small)
    done = run_recipe(mains, mains.interpreter, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "grpo")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(abs(row["mismatch/kl"]) < 1e-5 and row["actor/grad_norm"] > 0 for row in rows), rows

    model = tmp_path / "grpo/global_step_2/actor/huggingface"
    settings = [
        f"data.val_files={tmp_path / 'data/val.parquet'}",
        f"actor_rollout_ref.model.path={model}",
        f"custom_reward_function.path={RECIPES / 'vlm_count/reward.py'}",
        "algorithm.adv_estimator=reinforce_plus_plus",  # the default has a critic, and none reads pictures
        "data.max_prompt_length=36",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        f"trainer.default_local_dir={tmp_path / 'eval'}",
    ]
    evaluated = mains.run([*settings, *IN_PROCESS], module="rlhub.trainer.main_eval")
    assert evaluated.code == 0 and "val/pass@1" in evaluated.output, evaluated.output

    refused = mains.run([*settings, *IN_PROCESS, "actor_rollout_ref.rollout.mode=async"], module="rlhub.trainer.main_eval")
    assert refused.code != 0 and "have pictures (column 'images'), and episodes read text alone" in refused.output, refused.output
