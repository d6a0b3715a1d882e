from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import build_model
from rlhub.models.megatron import build
from rlhub.models.megatron.build import HFCheckpoint, ParamParts, TensorPart, load_weights
from rlhub.protocol.weights.pieces import Region, whole

GATE = "model.layers.1.mlp.gate_proj.weight"
CONFIG = Qwen3Config(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(path)
    return path


def entry(name: str, shape: tuple[int, ...], region: Region, rows: int) -> ParamParts:
    """A parameter of `rows` rows whose first hold the region."""
    (start, stop), width = region[0], whole(shape[1:])
    part = TensorPart(local=((0, stop - start), *width), name=name, shape=shape, region=region)
    return ParamParts(key=name, param=nn.Parameter(torch.full((rows, *shape[1:]), 9.0)), parts=[part])


def load(entries: list[ParamParts], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "param_parts", lambda _: entries)
    built: Any = SimpleNamespace(hf_config=CONFIG)
    load_weights(built, ModelConfig(path=str(path)), seed=5)


def gate(rows: int = 24) -> ParamParts:
    return entry(GATE, (rows, 16), ((12, 20), (0, 16)), 10)


def all_of_layer(path: Path) -> list[ParamParts]:
    """The gate's rows and, whole, all else of the layer."""
    others = {name: t for name, t in load_file(path / build.SINGLE).items() if ".layers.1." in name and name != GATE}
    return [gate(), *(entry(name, tuple(t.shape), whole(t.shape), t.shape[0]) for name, t in others.items())]


def test_boxes_are_read_and_padding_is_zero(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = all_of_layer(folder)
    load(entries, folder, monkeypatch)
    stored = load_file(folder / build.SINGLE)
    assert torch.equal(entries[0].param[:8], stored[GATE][12:20])
    assert not entries[0].param[8:].any()
    assert all(torch.equal(other.param, stored[other.key]) for other in entries[1:])


def test_sharded_checkpoints_are_read(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint, stored = HFCheckpoint(ModelConfig(path=str(tmp_path))), load_file(folder / build.SINGLE)
    assert checkpoint.file_of.keys() == stored.keys()
    assert all(torch.equal(checkpoint.read(name, whole(tensor.shape)), tensor) for name, tensor in stored.items())


def test_names_of_a_headless_checkpoint(folder: Path, tmp_path: Path) -> None:
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path)
    checkpoint = HFCheckpoint(ModelConfig(path=str(tmp_path)))
    assert checkpoint.stored_name(GATE) == GATE.removeprefix("model.")
    assert checkpoint.stored_name("lm_head.weight") is None


def test_missing_weights_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = [entry(f"model.layers.7.{i}.weight", (2, 2), whole((2, 2)), 2) for i in range(6)]
    with pytest.raises(ConfigError, match=r"it lacks model.layers.7.0.weight, .* and 2 more; use another checkpoint"):
        load(unknown, folder, monkeypatch)


def test_other_shapes_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gate_proj.weight is \(24, 16\), not \(32, 16\)"):
        load([*all_of_layer(folder)[1:], gate(32)], folder, monkeypatch)


def test_weights_nobody_takes_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silently left out, they would make another model: a bias of a kind that is not built."""
    entries = all_of_layer(folder)
    bias = "model.layers.1.self_attn.o_proj.bias"
    save_file({**load_file(folder / build.SINGLE), bias: torch.zeros(16)}, tmp_path / build.SINGLE)
    with pytest.raises(ConfigError, match=f"knows nothing of: {bias}"):
        load(entries, tmp_path, monkeypatch)


def test_other_layers_and_experts_are_other_ranks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = all_of_layer(folder)
    more = ("model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.x.weight", "model.layers.1.rotary_emb.inv_freq")
    save_file({**load_file(folder / build.SINGLE), **{name: torch.zeros(2) for name in more}}, tmp_path / build.SINGLE)
    load(entries, tmp_path, monkeypatch)


def test_checkpoints_without_safetensors_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no safetensors weights .*save the model again with save_pretrained"):
        HFCheckpoint(ModelConfig(path=str(tmp_path)))


def test_a_new_head_is_the_one_transformers_draws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = entry("score.weight", (1, 16), whole((1, 16)), 1)
    before = torch.get_rng_state()
    load([head], folder, monkeypatch)
    assert torch.equal(torch.get_rng_state(), before)
    plain = build_model(ModelConfig(path=str(folder)), "value", dtype=torch.float32, attention="sdpa", seed=5)
    assert torch.equal(head.param, plain.score.weight)
