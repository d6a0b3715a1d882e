"""main_sft clones recorded actions into a vision-language-action policy: in process and on two ranks, and the run exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhub.checkpoint.shard_reader import ShardReader
from rlhub.config.cli import prepare
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.data.episodes import RecordedEpisode, write_episodes
from rlhub.trainer import main_export
from rlhub.trainer.main_sft import main
from rlhub.trainer.preflight.checks import check
from rlhub.workers.export import Verification, verify_export
from tests.support import vla
from tests.support.metrics import rows_of

STEPS, FRAMES = 12, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cloning")
    vla.write_policy(folder / "model")
    for name, count in (("train", 12), ("val", 4)):
        write_episodes(folder / name, [episode(number) for number in range(count)])
    return folder


def episode(number: int) -> RecordedEpisode:
    """The colour of the picture says which way to go, and the instruction says whether to."""
    bright, word = number % 2, ("red", "blue")[number // 2 % 2]
    noise = np.random.default_rng(number).integers(0, 30, (FRAMES, 32, 32, 3))
    actions = np.full((FRAMES, vla.ACTION_DIM), 0.8 if bright else -0.8) * (1 if word == "red" else 0)
    return RecordedEpisode(
        instruction=f"reach {word}",
        images={"top": (noise + 220 * bright).astype(np.uint8)},
        actions=actions.astype(np.float32),
    )


def clone(folder: Path, name: str, *more: str) -> Path:
    settings = ", ".join(f"{key}: {value}".replace("True", "true") for key, value in vla.settings().items())
    overrides = [
        f"model.path={folder / 'model'}",
        f"model.vla={{{settings}}}",
        f"data.train_files={folder / 'train'}",
        f"data.val_files={folder / 'val'}",
        "data.train_batch_size=16",
        "data.max_length=24",
        "optim.lr=3e-3",
        "trainer.device=cpu",
        "trainer.logger=[]",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS // 2}",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder / name}",
        *more,
    ]
    assert main(prepare(SFTConfig, "sft", overrides, preflight=check)) == 0
    return folder / name


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    return clone(folder, "alone", "trainer.backend=local")


def test_it_learns_what_the_pictures_and_the_words_say(alone: Path) -> None:
    rows = rows_of(alone)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == STEPS and losses[-1] < 0.5 * losses[0], losses
    val = [row["val/loss"] for row in rows if "val/loss" in row]
    assert val[-1] < 0.6 * float(np.log(vla.BINS)), val


def test_two_ranks_under_ray_clone_the_same(ray_cluster: None, folder: Path, alone: Path) -> None:
    both = clone(folder, "both", "trainer.backend=ray", "trainer.n_gpus_per_node=2")
    losses = [[row["train/loss"] for row in rows_of(run) if "train/loss" in row] for run in (alone, both)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert weights(both).keys() == weights(alone).keys()
    assert all(torch.allclose(weights(both)[name], value, atol=2e-3) for name, value in weights(alone).items())


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / f"global_step_{STEPS}").rglob("huggingface/model.safetensors")
    return load_file(file)


def test_a_clone_is_exported_and_verified(alone: Path, tmp_path: Path) -> None:
    """transformers loads the folder by itself; a changed weight of the vision part is found."""
    output = tmp_path / "model"
    assert main_export.command([f"checkpoint={alone}", f"output={output}", "--verify"]) == 0
    exported, trained = load_file(output / "model.safetensors"), weights(alone)
    assert exported.keys() == trained.keys() and all(torch.equal(exported[name], trained[name]) for name in exported)
    assert verified(alone, output).first_difference is None
    (name,) = (name for name in exported if name.endswith("patch_embedding.weight"))
    exported[name].view(-1)[3] += 1e-3
    save_file(exported, output / "model.safetensors", metadata={"format": "pt"})
    found = verified(alone, output).first_difference
    assert found is not None and f"{name}: 1 of" in found


def verified(run: Path, output: Path) -> Verification:
    (model,) = (run / f"global_step_{STEPS}").glob("*/huggingface")
    with ShardReader(model.parent) as reader:
        given = ModelConfig(path=str(output))
        return verify_export(given, "vla", reader, stored_dtype=torch.float32, dtype=None)
