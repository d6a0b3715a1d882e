"""main_sft clones recorded actions into a tiny PI0 by its flow loss: in process and on two ranks, and the run exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PI0Config, PI0ForConditionalGeneration

from recipes.tiny_smolvlm import build_tokenizer
from rlhub.config.cli import prepare
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.config.sections.vla import vla_of
from rlhub.data.episodes import EpisodeDataset, RecordedEpisode, write_episodes
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.errors import ConfigError, EngineError
from rlhub.models.tokenizer import load_tokenizer
from rlhub.models.vla.flow import flow_columns
from rlhub.trainer import main_export
from rlhub.trainer.main_sft import main
from rlhub.trainer.preflight.checks import check
from tests.support.metrics import rows_of

STEPS, FRAMES, CHUNK, ACTION_DIM, STATE_DIM, IMAGE, SIZE, PATCH = 40, 6, 2, 2, 3, 3, 16, 8
TOKENS_PER_IMAGE = (SIZE // PATCH) ** 2
CPU = torch.device("cpu")
VLA = {
    "chunk": CHUNK,
    "action_dim": ACTION_DIM,
    "decoding": "flow",
    "image_token_id": IMAGE,
    "tokens_per_image": TOKENS_PER_IMAGE,
}


def write_pi0(folder: Path) -> None:
    """Writes a PI0 of one layer each for pictures, words and actions, with a tokenizer."""
    tokenizer = build_tokenizer(("reach", "red", "blue"), num_places=1, num_bins=1)
    text = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    text |= {"num_key_value_heads": 1, "vocab_size": 64, "model_type": "gemma", "pad_token_id": 0, "eos_token_id": 1}
    text |= {"bos_token_id": None}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": SIZE, "patch_size": PATCH, "vision_use_head": False}
    config = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": text,
            "vision_config": vision,
            "projection_dim": 32,
            "image_token_id": IMAGE,
        },
        dit_config=text,
        chunk_size=CHUNK,
        max_state_dim=STATE_DIM + 1,
        max_action_dim=ACTION_DIM,
        num_inference_steps=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        PI0ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flow")
    write_pi0(folder / "model")
    for name, count in (("train", 12), ("val", 4)):
        write_episodes(folder / name, [episode(number) for number in range(count)])
    return folder


def episode(number: int) -> RecordedEpisode:
    """The colour of the picture says which way to go."""
    bright = number % 2
    noise = np.random.default_rng(number).integers(0, 30, (FRAMES, SIZE, SIZE, 3))
    return RecordedEpisode(
        instruction=f"reach {('red', 'blue')[number // 2 % 2]}",
        images={"top": (noise + 220 * bright).astype(np.uint8)},
        actions=np.full((FRAMES, ACTION_DIM), 0.8 if bright else -0.8, np.float32),
        state=np.full((FRAMES, STATE_DIM), 0.1 * number, np.float32),
    )


def clone(folder: Path, name: str, *more: str) -> Path:
    overrides = [
        f"model.path={folder / 'model'}",
        f"model.vla={{{', '.join(f'{key}: {value}' for key, value in VLA.items())}}}",
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


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / f"global_step_{STEPS}").rglob("huggingface/model.safetensors")
    return load_file(file)


def test_the_loss_falls(alone: Path) -> None:
    rows = rows_of(alone)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == STEPS and np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), losses
    val = [row["val/loss"] for row in rows if "val/loss" in row]
    assert val[-1] < 0.7 * val[0], val


def test_two_ranks_under_ray_clone_the_same(ray_cluster: None, folder: Path, alone: Path) -> None:
    both = clone(folder, "both", "trainer.backend=ray", "trainer.n_gpus_per_node=2")
    losses = [[row["train/loss"] for row in rows_of(run) if "train/loss" in row] for run in (alone, both)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert all(torch.allclose(weights(both)[name], value, atol=2e-3) for name, value in weights(alone).items())


def test_the_errors_are_those_of_the_plain_model(folder: Path) -> None:
    """At fixed noise and time, row by row without padding, by transformers' own loss; however the rows are cut."""
    model = ModelConfig(path=str(folder / "model"), vla=dict(VLA), enable_gradient_checkpointing=False)
    rows = frames(folder, model, [0, 4, 5, 30])
    plain = AutoModelForImageTextToText.from_pretrained(model.path, dtype=torch.float32)
    plain.config.loss_reduction = "none"
    expected = [reference(plain, rows, row) for row in range(4)]
    for cut in (None, 1):
        engine = flow_engine(model, cut)
        errors = engine.infer(rows, outputs=("flow_errors",))["flow_errors"]
        mask = rows["response_mask"].bool()
        assert mask[2].tolist() == [True, True, False, False], "behind the episode's end nothing is learned"
        for row in range(4):
            assert torch.allclose(errors[row][mask[row]], expected[row][mask[row]], atol=1e-5)
        assert (errors[~mask] == 0).all()
    with pytest.raises(EngineError, match="it has no log-probs"):
        engine.infer(rows, outputs=("log_probs",))
    changed = dict(rows, pixel_values=255 - rows["pixel_values"])
    assert not torch.allclose(engine.infer(changed, outputs=("flow_errors",))["flow_errors"], errors, atol=1e-4)


def flow_engine(model: ModelConfig, rows: int | None) -> FSDPEngine:
    ensure_process_group(CPU)
    cut = MicroBatchConfig(rows=rows)
    section = FSDPConfig(model_dtype="fp32")
    engine = FSDPEngine(model, section, OptimConfig(lr=1e-3), kind="vla", device=CPU, micro_batch=cut)
    engine.initialize()
    return engine


def frames(folder: Path, model: ModelConfig, chosen: list[int]) -> dict[str, torch.Tensor]:
    vla, config = vla_of(model), PI0Config.from_pretrained(str(model.path))
    assert vla is not None
    data = EpisodeDataset(str(folder / "train"), load_tokenizer(model.path), vla, vocab_size=64)
    batch = dict(data.batch(np.asarray(chosen)).batch.items())
    reader, seeds = data.reader, [[7, 1, frame] for frame in chosen]
    assert reader.states is not None
    actions = reader.chunks(np.asarray(chosen), CHUNK)
    return batch | {"pixel_values": reader.images(chosen)} | flow_columns(config, vla, actions, reader.states[chosen], seeds)


@torch.no_grad()
def reference(plain: torch.nn.Module, rows: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    prompt = rows["prompts"][row][rows["attention_mask"][row, : rows["prompts"].shape[1]].bool()][None]
    pixels = (rows["pixel_values"][row][None].float() / 255 - 0.5) / 0.5
    loss = plain(
        state=rows["robot_state"][row].view(1, -1),
        noise=rows["noise"][row].view(1, CHUNK, ACTION_DIM),
        timestep=rows["times"][row][None],
        input_ids=prompt,
        pixel_values=pixels,
        pixel_attention_mask=torch.ones(1, 1, dtype=torch.bool),
        attention_mask=torch.ones_like(prompt),  # with one, positions begin at 0
        actions=rows["actions"][row].view(1, CHUNK, ACTION_DIM),
    ).loss
    return loss.flatten()


def test_noise_follows_from_numbers(folder: Path) -> None:
    model = ModelConfig(path=str(folder / "model"), vla=dict(VLA))
    one, other = frames(folder, model, [3, 9]), frames(folder, model, [9])
    assert torch.equal(one["noise"][1:], other["noise"]) and torch.equal(one["times"][1:], other["times"])
    assert not torch.equal(one["noise"][0], one["noise"][1]) and 0 < one["times"].min() <= one["times"].max() <= 1


def test_a_clone_is_exported_and_verified(alone: Path, tmp_path: Path) -> None:
    """transformers loads the folder by itself and samples actions; a changed weight is found."""
    output = tmp_path / "model"
    command = [f"checkpoint={alone}", f"output={output}", "--verify"]
    assert main_export.command(command) == 0
    exported, trained = load_file(output / "model.safetensors"), weights(alone)
    assert exported.keys() == trained.keys() and all(torch.equal(exported[name], trained[name]) for name in exported)
    plain = AutoModelForImageTextToText.from_pretrained(output, dtype=torch.float32)
    found = {bright: sampled(plain, bright) for bright in (0, 1)}
    assert found[1].mean() > found[0].mean() + 0.3, "the clone goes where the picture says"


def sampled(plain: PI0ForConditionalGeneration, bright: int) -> torch.Tensor:
    torch.manual_seed(0)
    count = 16
    ids = torch.tensor([[4, 5, *[IMAGE] * TOKENS_PER_IMAGE]] * count)
    pixels = torch.full((count, 1, 3, SIZE, SIZE), (220.0 * bright + 15) / 127.5 - 1)
    seen = torch.ones(count, 1, dtype=torch.bool)
    state = torch.zeros(count, STATE_DIM + 1)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "pixel_attention_mask": seen}
    return plain.sample_actions(state=state, **asked)


def test_policy_gradients_are_refused(folder: Path) -> None:
    settings = ", ".join(f"{key}: {value}" for key, value in VLA.items())
    overrides = [f"actor_rollout_ref.model.path={folder / 'model'}", f"actor_rollout_ref.model.vla={{{settings}}}"]
    with pytest.raises(ConfigError, match="PI0 gives no log-probs of its actions.*clone it with main_sft"):
        prepare(PPOConfig, "ppo", [*overrides, "env.name=reach_color", "trainer.device=cpu"], preflight=check)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunk": 3}, r"chunk and image_token_id are \(3, 3\), but those of the model are \(2, 3\)"),
        ({"action_dim": 5}, "action_dim=5 is more than the model's max_action_dim=2"),
        ({"value_head": True}, "value_head=True: a policy with decoding=flow is cloned only"),
    ],
)
def test_settings_that_do_not_fit_the_model(folder: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        flow_engine(ModelConfig(path=str(folder / "model"), vla=VLA | changes), None)
