"""Training from samples of quantized weights, by every way that new weights take to hf engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Mains, Task
from tests.support.metrics import rows_of

R = "actor_rollout_ref.rollout"
QUANTIZED = (f"{R}.name=hf", f"{R}.quantization=fp8", "algorithm.rollout_correction.rollout_is=token")
RAY = ("trainer.backend=ray", "trainer.ray_init.num_cpus=4", "trainer.ray_init.object_store_memory=100000000")
STEPS = 3
RAY_TIMEOUT_S = 500.0
LEAST, MOST = 1e-6, 0.05
"""Nats between sampler and trainer: in float32 without quantization it is less, and weights of another step are farther."""
SWAPPING_PLUGIN = """
import torch

from rlhub.engines.rollout.hf.engine import HFEngine

update = HFEngine.update_weights

def update_and_swap(self, buckets, version):
    update(self, buckets, version)
    if version == 2:
        for piece in self.live_weights():
            if piece.name.endswith("down_proj.weight_scale_inv"):
                piece.tensor.copy_(piece.tensor.flip(1) * (1 if piece.tensor.shape[1] > 1 else 2))

HFEngine.update_weights = update_and_swap
"""

WAYS: dict[str, tuple[str, ...]] = {
    "two fsdp2 ranks": (*RAY, "trainer.n_gpus_per_node=2"),
    "pools of their own": (*RAY, "trainer.pools.generation.n_gpus_per_node=1", "trainer.placement.rollout=generation"),
    "memory": (f"{R}.mode=async", f"{R}.weights=memory", "trainer.max_staleness=1"),
    "folder": (f"{R}.mode=async", f"{R}.weights=folder", "trainer.max_staleness=1"),
    "collective": (*RAY, f"{R}.mode=async", f"{R}.weights=collective", "trainer.max_staleness=1"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_job_trains_from_quantized_weights(mains: Mains, task: Task, tmp_path: Path, way: str) -> None:
    settings = task.arguments(tmp_path, *QUANTIZED, *WAYS[way], f"trainer.total_training_steps={STEPS}")
    done = mains.start(settings).wait(RAY_TIMEOUT_S)
    assert done.code == 0, done.output
    rows = rows_of(tmp_path)
    assert len(rows) == STEPS
    for row in rows:
        assert LEAST < row["mismatch/abs_diff"] < MOST and row["mismatch/ess"] > 0.9, way
        assert row["correction/weight_max"] != row["correction/weight_min"], "tokens are weighted"


def test_without_quantization_there_is_no_such_mismatch(mains: Mains, task: Task, tmp_path: Path) -> None:
    done = mains.run(task.arguments(tmp_path, f"{R}.name=hf", "trainer.total_training_steps=1"))
    assert done.code == 0, done.output
    assert rows_of(tmp_path)[0]["mismatch/abs_diff"] < LEAST


def test_scales_that_change_after_an_update_end_the_run_with_their_name(mains: Mains, task: Task, tmp_path: Path) -> None:
    (tmp_path / "swapping_plugin.py").write_text(SWAPPING_PLUGIN)
    settings = task.arguments(
        tmp_path / "run", *QUANTIZED, "trainer.plugins=[swapping_plugin]", f"trainer.total_training_steps={STEPS}"
    )
    done = mains.run(settings, env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 1 and "does not hold the trainer's model.layers.0.mlp.down_proj.weight_scale_inv" in done.output


def test_samples_of_quantized_weights_without_correction_are_refused(mains: Mains, task: Task, tmp_path: Path) -> None:
    done = mains.run(task.arguments(tmp_path, *QUANTIZED[:2]))
    assert done.code == 2 and "set algorithm.rollout_correction.rollout_is=token" in done.output
    assert "Traceback" not in done.output
