"""Weights that are lost, damaged or not finite end a command with their names, and no good checkpoint is lost to them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhub.models.weight_files import SINGLE
from tests.e2e.conftest import Mains, Task
from tests.support.metrics import rows_of

EXIT_FAILURE, EXIT_USAGE = 1, 2
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
TOO_FAST = "actor_rollout_ref.actor.optim.lr=1e39"
"""A number, but none of the weights' float32."""
CORRUPTING = """
import torch

from rlhub.engines.rollout.hf.engine import HFEngine
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES


@ROLLOUT_ENGINES.register("corrupting")
class Corrupting(HFEngine):
    def _generate(self, requests, params):
        if self.version == 2:
            for piece in self.live_weights():
                if piece.name == "model.norm.weight":
                    piece.tensor.mul_(1000 * torch.randn(piece.tensor.shape))
        return super()._generate(requests, params)
"""


@pytest.fixture
def damaged(task: Task, tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], object]], Path]:
    def damage(change: Callable[[dict[str, Tensor]], object]) -> Path:
        shutil.copytree(task.folder / "model", tmp_path / "damaged")
        tensors = load_file(tmp_path / "damaged" / SINGLE)
        change(tensors)
        save_file(tensors, tmp_path / "damaged" / SINGLE, {"format": "pt"})
        return tmp_path / "damaged"

    return damage


def checkpoints(run_folder: Path) -> list[str]:
    return sorted(path.name for path in run_folder.glob("global_step_*"))


def test_a_lost_tensor_ends_every_main_before_it_starts_a_process(
    mains: Mains, task: Task, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    """It was filled with random numbers: a model that answers at random, and exit status 0."""
    path = damaged(lambda tensors: tensors.pop(UP))
    policy = task.arguments(tmp_path / "run", f"actor_rollout_ref.model.path={path}", "trainer.backend=ray")
    pairs = [f"data.train_files={task.folder / 'train.parquet'}", "data.response_key=data_source", f"model.path={path}"]
    asked = {
        "main_ppo": policy,
        "main_eval": [*policy, f"data.val_files={task.folder / 'val.parquet'}"],
        "main_sft": [*pairs, f"trainer.default_local_dir={tmp_path / 'sft'}", "data.train_batch_size=8", "trainer.device=cpu"],
        "main_serve": [f"model.path={path}", "rollout.name=hf", "device=cpu"],
    }
    for main, arguments in asked.items():
        result = mains.run(arguments, module=f"rlhub.trainer.{main}")
        assert result.code == EXIT_USAGE, f"{main}: {result.output}"
        assert f"it lacks {UP}" in result.output and str(path) in result.output, f"{main}: {result.output}"
        assert "Traceback" not in result.output and "Ray cluster" not in result.output, main


def test_a_file_cut_short_is_told_with_the_other_problems(mains: Mains, task: Task, tmp_path: Path) -> None:
    shutil.copytree(task.folder / "model", tmp_path / "cut")
    file = tmp_path / "cut" / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    result = mains.run(
        task.arguments(tmp_path / "run", f"actor_rollout_ref.model.path={tmp_path / 'cut'}", "data.train_batch_size=7")
    )
    assert result.code == EXIT_USAGE
    assert f"actor_rollout_ref.model.path={tmp_path / 'cut'}: {file} is cut short" in result.output
    assert "ppo_mini_batch_size" in result.output and not (tmp_path / "run").exists()


def test_a_model_that_is_not_finite_is_not_evaluated(
    mains: Mains, task: Task, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    """It got pass@1 0.0000, exit status 0: by its weights, and by what finite weights compute."""
    path = damaged(lambda tensors: tensors[UP][0].fill_(float("nan")))
    arguments = task.arguments(tmp_path / "run", f"actor_rollout_ref.model.path={path}")
    arguments += [f"data.val_files={task.folder / 'val.parquet'}"]
    result = mains.run(arguments, module="rlhub.trainer.main_eval")
    assert result.code == EXIT_USAGE and f"not finite: {UP} ({SINGLE})" in result.output, result.output
    tensors = load_file(task.folder / "model" / SINGLE)
    save_file(tensors | {NORM: torch.full_like(tensors[NORM], 3e38)}, path / SINGLE, {"format": "pt"})
    result = mains.run(arguments, module="rlhub.trainer.main_eval")
    assert result.code == EXIT_FAILURE and "log-probs that are not finite" in result.output, result.output
    assert "pass@1" not in result.output


def test_weights_that_become_infinite_are_never_saved_and_the_good_checkpoint_stays(
    mains: Mains, task: Task, tmp_path: Path
) -> None:
    """They replaced the only good checkpoint, and every later start died with an index error."""
    saving = ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"]
    first = mains.run(task.arguments(tmp_path, *saving, "trainer.total_training_steps=1"))
    assert first.code == 0 and checkpoints(tmp_path) == ["global_step_1"], first.output
    second = mains.run(task.arguments(tmp_path, *saving, TOO_FAST))
    assert second.code == EXIT_FAILURE, second.output
    assert "weights are not finite after the update: model.embed_tokens.weight" in second.output and "optim.lr" in second.output
    assert checkpoints(tmp_path) == ["global_step_1"]
    third = mains.run(task.arguments(tmp_path, *saving, "trainer.total_training_steps=3"))
    assert third.code == 0 and checkpoints(tmp_path) == ["global_step_3"], third.output


def test_an_engine_that_is_corrupted_after_the_sync_stops_the_run(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Its fingerprints were right when they were compared; the step trained on what it wrote."""
    (tmp_path / "corrupting.py").write_text(CORRUPTING)
    settings = ["trainer.plugins=[corrupting]", "actor_rollout_ref.rollout.name=corrupting", "trainer.save_freq=1"]
    result = mains.run(task.arguments(tmp_path / "run", *settings), env={"PYTHONPATH": str(tmp_path)})
    assert result.code == EXIT_FAILURE, result.output
    assert "the rollout engine does not sample from the policy that is trained" in result.output
    assert "algorithm.rollout_correction.mismatch_stop" in result.output
    assert checkpoints(tmp_path / "run") == ["global_step_1", "global_step_2"]
    assert all(abs(row["mismatch/kl"]) < 1e-5 for row in rows_of(tmp_path / "run"))


def test_steps_that_are_all_skipped_end_the_run_with_its_state_saved(mains: Mains, task: Task, tmp_path: Path) -> None:
    result = mains.run(task.arguments(tmp_path, "actor_rollout_ref.actor.entropy_coeff=1e39"))
    assert result.code == EXIT_FAILURE, result.output
    assert "3 training steps in a row were skipped" in result.output and "trainer.max_skipped_steps" in result.output
    assert checkpoints(tmp_path) == ["global_step_3"] and len(rows_of(tmp_path)) == 3
