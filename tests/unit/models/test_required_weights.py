"""A model folder that lacks something is an error that names it; what may be absent is not.

Each case is read as a training engine reads it, and compared without reading a weight, as the driver does before it starts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3MoeConfig

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import build_model, check_weights
from rlhub.models.shape import ModelKind
from rlhub.models.tokenizer import check_tokenizer
from rlhub.models.weight_files import INDEX, SINGLE, file_problems
from tests.unit.models.conftest import save_model, save_tokenizer

UP = "model.layers.1.mlp.up_proj.weight"


def build(path: Path, kind: ModelKind = "policy") -> torch.nn.Module:
    return build_model(ModelConfig(path=str(path)), kind, dtype=torch.float32, attention="sdpa", seed=5)


def refusals(path: Path, kind: ModelKind = "policy") -> list[str]:
    """What building says, and what the comparison before it says."""
    texts = []
    for attempt in (lambda: build(path, kind), lambda: check_weights(ModelConfig(path=str(path)), kind)):
        with pytest.raises(ConfigError) as caught:
            attempt()
        texts.append(str(caught.value))
    return texts


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the folder with other tensors."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(target / SINGLE)
    change(tensors)
    save_file(tensors, target / SINGLE, {"format": "pt"})
    return target


def test_a_lost_tensor_is_an_error_that_names_it(model_folder: Path, tmp_path: Path) -> None:
    path = changed(model_folder, tmp_path, lambda tensors: tensors.pop(UP))
    for text in refusals(path):
        assert f"it lacks {UP}" in text and str(path) in text


def test_tensors_of_another_model_are_an_error_that_names_them(model_folder: Path, tmp_path: Path) -> None:
    path = changed(model_folder, tmp_path, lambda tensors: tensors.update({"net.up": tensors.pop(UP)}))
    for text in refusals(path):
        assert f"it lacks {UP}" in text and f"qwen2 has no net.up ({SINGLE})" in text


def test_another_shape_is_an_error_with_both(model_folder: Path, tmp_path: Path) -> None:
    path = changed(model_folder, tmp_path, lambda tensors: tensors.update({UP: torch.zeros(23, 16)}))
    for text in refusals(path):
        assert f"{UP} is (23, 16), not (24, 16) as config.json says" in text


def test_an_embedding_of_another_vocabulary_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"vocab_size": 40}))
    for text in refusals(tmp_path):
        assert "model.embed_tokens.weight is (31, 16), not (40, 16)" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named_with_their_file(model_folder: Path, tmp_path: Path, value: float) -> None:
    path = changed(model_folder, tmp_path, lambda tensors: tensors[UP][3, 4].fill_(value))
    with pytest.raises(ConfigError, match=rf"not finite: {UP} \({SINGLE}\)"):
        build(path)


def test_a_lost_expert_is_named_as_in_the_file(tmp_path: Path) -> None:
    """transformers holds the experts of a layer in one tensor."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=1, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    check_weights(ModelConfig(path=str(tmp_path / "whole")), "policy")
    for kind in ("up_proj", "down_proj"):
        expert = f"model.layers.0.mlp.experts.1.{kind}.weight"
        path = changed(tmp_path / "whole", tmp_path / kind, lambda tensors, name=expert: tensors.pop(name))
        for text in refusals(path):
            assert f"it lacks {expert}" in text


def test_heads_of_the_other_kind_of_model_and_new_heads_are_no_error(model_folder: Path, tmp_path: Path) -> None:
    untied = save_model(tmp_path / "untied", tie_word_embeddings=False)
    for path in (model_folder, untied):
        for kind in ("policy", "value", "reward"):
            check_weights(ModelConfig(path=str(path)), kind)
    AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1).save_pretrained(tmp_path / "scores")
    assert build(tmp_path / "scores").config.tie_word_embeddings, "a tied policy from a critic's folder"
    old = changed(
        model_folder, tmp_path / "old", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    )
    build(old)


def test_a_classifier_that_lost_its_head_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    """A new one would be random, and its scores look like any others."""
    AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1).save_pretrained(tmp_path / "whole")
    path = changed(tmp_path / "whole", tmp_path / "lost", lambda tensors: tensors.pop("score.weight"))
    for kind in ("value", "reward"):
        for text in refusals(path, kind):
            assert "it lacks score.weight" in text


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    whole = save_model(tmp_path / "whole", tie_word_embeddings=False)
    path = changed(whole, tmp_path / "headless", lambda tensors: tensors.pop("lm_head.weight"))
    for text in refusals(path):
        assert "it lacks lm_head.weight" in text
    check_weights(ModelConfig(path=str(path)), "value")


@pytest.mark.parametrize("length", [0, 5, 200, 3000])
def test_a_file_cut_short_is_named_without_loading_torch(model_folder: Path, tmp_path: Path, length: int) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:length])
    (problem,) = file_problems(tmp_path)
    assert str(tmp_path / SINGLE) in problem and "cut short" in problem and "again" in problem
    assert all(problem in text for text in refusals(tmp_path))


def test_an_index_that_names_what_is_not_there(model_folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path, max_shard_size="5KB")
    assert file_problems(tmp_path) == []
    index = json.loads((tmp_path / INDEX).read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"]["model.norm.weight"])
    index["weight_map"] |= {UP: "model-00009-of-00009.safetensors", "model.norm.weight": other}
    (tmp_path / INDEX).write_text(json.dumps(index))
    problems = "\n".join(file_problems(tmp_path))
    assert "names model-00009-of-00009.safetensors, which is not there" in problems
    assert f"model.norm.weight should be in {other}" in problems
    (tmp_path / INDEX).write_text("{")
    assert "cannot be read as an index" in file_problems(tmp_path)[0]


def test_folders_without_safetensors_have_no_file_problems_and_no_weights_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / SINGLE).unlink()
    assert file_problems(tmp_path) == []
    assert all("cannot be loaded" in text and str(tmp_path) in text for text in refusals(tmp_path))
    tensors = load_file(model_folder / SINGLE)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    build(tmp_path)
    torch.save({name: tensor for name, tensor in tensors.items() if name != UP}, tmp_path / "pytorch_model.bin")
    assert all(f"it lacks {UP}" in text for text in refusals(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02 nothing")
    assert all("cannot be loaded" in text for text in refusals(tmp_path))


def test_a_tokenizer_with_more_ids_than_the_embedding_is_an_error(tmp_path: Path) -> None:
    path = save_tokenizer(save_model(tmp_path, vocab_size=3), eos_token="<eos>")
    with pytest.raises(ConfigError, match=r"no embedding for: 'b' = 3, where vocab_size in config.json is 3"):
        check_tokenizer(ModelConfig(path=str(path)))
    check_tokenizer(ModelConfig(path=str(save_tokenizer(save_model(tmp_path / "larger", vocab_size=9), eos_token="<eos>"))))
