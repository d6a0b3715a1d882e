"""Tokenizer, sidecars and building from a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import build_model, save_sidecars, transformer_layers
from rlhub.models.tokenizer import load_tokenizer
from tests.unit.models.conftest import save_model, save_tokenizer


def test_tokenizer_pads_left(model_folder: Path) -> None:
    tokenizer = load_tokenizer(str(model_folder))
    assert (tokenizer.padding_side, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("left", 0, 1)


def test_tokenizer_without_padding_token_uses_the_end(tmp_path: Path) -> None:
    assert load_tokenizer(str(save_tokenizer(tmp_path, eos_token="<eos>"))).pad_token_id == 1


def test_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_tokenizer(None)
    with pytest.raises(ConfigError, match="end-of-sequence"):
        load_tokenizer(str(save_tokenizer(tmp_path, pad_token="<pad>")))
    with pytest.raises(ConfigError, match="nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_sidecars(model_folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(model_folder), override_config={"rms_norm_eps": 1e-3})
    save_sidecars(config, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["rms_norm_eps"] == 1e-3
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["temperature"] == 0.5
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"


def build(path: Path, kind: str = "policy", **config: object) -> torch.nn.Module:
    return build_model(ModelConfig(path=str(path), **config), kind, dtype=torch.float32, attention="sdpa", seed=5)


@pytest.mark.parametrize("kind", ["value", "reward"])
def test_new_scalar_head_depends_on_the_seed_only(model_folder: Path, kind: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(model_folder, kind).score.weight
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(build(model_folder, kind).score.weight, first)
    assert first.abs().max() > 0


def test_reward_sidecars_load_as_a_classifier(model_folder: Path, tmp_path: Path) -> None:
    save_sidecars(ModelConfig(path=str(model_folder)), tmp_path, "reward")
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.architectures, config.num_labels, config.pad_token_id) == (["Qwen2ForSequenceClassification"], 1, 0)


def test_padding_with_the_end_token_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_tokenizer(save_model(tmp_path / "model"), eos_token="<eos>")
    save_sidecars(ModelConfig(path=str(path)), tmp_path / "out", "reward")
    assert "pads with its end token" in caplog.text


def test_reward_models_keep_their_own_head(model_folder: Path, tmp_path: Path) -> None:
    classifier = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    classifier.score.weight.data.normal_()
    classifier.save_pretrained(tmp_path / "one")
    assert torch.equal(build(tmp_path / "one", "reward").score.weight, classifier.score.weight)


def test_reward_model_refusals(model_folder: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="classifier with 3 labels"):
        build(tmp_path / "three", "reward")
    AutoModelForTokenClassification.from_pretrained(model_folder).save_pretrained(tmp_path / "tokens")
    with pytest.raises(ConfigError, match="Qwen2ForTokenClassification"):
        build(tmp_path / "tokens", "reward")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 31}
    encoder = BertForSequenceClassification(BertConfig(**shape, num_labels=1))
    encoder.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigError, match="no linear head named 'score'"):
        build(tmp_path / "encoder", "reward")


def test_dropout_is_off_unless_asked_for(tmp_path: Path) -> None:
    path = save_model(tmp_path, attention_dropout=0.5)
    assert build(path).config.attention_dropout == 0
    assert build(path, override_config={"attention_dropout": 0.25}).config.attention_dropout == 0.25


def test_unknown_override_is_an_error(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="atention_dropout"):
        build(model_folder, override_config={"atention_dropout": 0.1})


def test_layers_are_found_in_order(model_folder: Path) -> None:
    model = build(model_folder)
    assert transformer_layers(model) == list(model.model.layers)


def test_models_that_change_logits_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GraniteConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    for scaling in (1.0, 4.0):
        AutoModelForCausalLM.from_config(GraniteConfig(vocab_size=9, logits_scaling=scaling, **sizes)).save_pretrained(tmp_path)
        if scaling == 1.0:
            build(tmp_path)
        else:
            with pytest.raises(ConfigError, match="logits_scaling"):
                build(tmp_path)
