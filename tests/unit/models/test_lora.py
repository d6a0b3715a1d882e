from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.lora import add_lora, load_adapter, lora_layers, lora_names, named_parameters, set_adapters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(5, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x)))


def adapted(seed: int = 1, **config: object) -> Block:
    torch.manual_seed(0)
    block = Block()
    add_lora(block, ModelConfig(lora_rank=2, lora_alpha=6.0, **config), head=block.head, seed=seed)
    return block


def test_starts_as_the_model_it_adapts_and_trains_adapters_only() -> None:
    torch.manual_seed(0)
    plain, block, x = Block(), adapted(), torch.randn(4, 5)
    assert torch.equal(block(x), plain(x))
    adapters = {f"{layer}.lora_{side}.default.weight" for layer in ("up", "down") for side in "AB"}
    named = dict(named_parameters(block))
    assert {name for name, param in named.items() if param.requires_grad} == adapters
    assert named.keys() == adapters | {name for name, _ in plain.named_parameters()}
    assert all(torch.equal(named[name], param) for name, param in plain.named_parameters())


def test_formula_and_switch() -> None:
    block, x = adapted(), torch.randn(4, 5)
    off = block(x)
    named = dict(named_parameters(block))
    for names in lora_names(block):
        nn.init.normal_(named[names.lora_b])
    assert not torch.allclose(block(x), off)
    merged = Block()
    merged.load_state_dict(named, strict=False)
    for names in lora_names(block):
        weight = named[names.weight] + 6.0 / 2 * named[names.lora_b] @ named[names.lora_a]
        merged.get_parameter(names.weight).data = weight.detach()
        assert names.scaling == 6.0 / 2
    torch.testing.assert_close(block(x), merged(x))
    set_adapters(block, False)
    assert torch.equal(block(x), off)
    set_adapters(block, True)
    torch.testing.assert_close(block(x), merged(x))


@pytest.mark.parametrize("trained", [True, False])
def test_the_switch_decides_nothing_about_training(trained: bool) -> None:
    block = adapted()
    block.requires_grad_(trained)
    for enabled in (False, True):
        set_adapters(block, enabled)
        assert all(param.requires_grad is trained for param in block.parameters())


def test_the_seed_alone_decides() -> None:
    def drawn(seed: int, state: int) -> list[torch.Tensor]:
        block = Block()
        torch.manual_seed(state)
        before = torch.get_rng_state()
        add_lora(block, ModelConfig(lora_rank=2), head=None, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return [dict(named_parameters(block))[names.lora_a] for names in lora_names(block)]

    assert all(map(torch.equal, drawn(1, state=5), drawn(1, state=6)))
    assert not any(map(torch.equal, drawn(1, state=5), drawn(2, state=5)))


def test_named_targets() -> None:
    assert [name for name, _ in lora_layers(adapted(target_modules=["down"]))] == ["down"]
    assert [name for name, _ in lora_layers(adapted(target_modules="up"))] == ["up"]
    with pytest.raises(ConfigError, match=r"\['dwn'\].*down"):
        adapted(target_modules=["up", "dwn"])
    with pytest.raises(ConfigError, match=r"\['head'\].*down"):
        adapted(target_modules=["head"])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.down_proj"]])
@pytest.mark.parametrize("task", [TaskType.CAUSAL_LM, TaskType.SEQ_CLS])
def test_targets_mean_what_they_mean_to_peft(model_folder: Path, task: TaskType, targets: str | list[str]) -> None:
    def model() -> nn.Module:
        if task == TaskType.CAUSAL_LM:
            return AutoModelForCausalLM.from_pretrained(model_folder)
        return AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)

    ours = model()
    head = ours.get_output_embeddings() if task == TaskType.CAUSAL_LM else ours.get_submodule("score")
    add_lora(ours, ModelConfig(lora_rank=2, target_modules=targets), head=head, seed=0)
    theirs = get_peft_model(model(), LoraConfig(r=2, target_modules=targets, task_type=task)).get_base_model()
    layers = [name for name, _ in lora_layers(ours)]
    assert layers == [name for name, _ in lora_layers(theirs)]
    assert len(layers) == (14 if targets == "all-linear" else 4)


def test_dtype_is_the_models(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    add_lora(model, ModelConfig(lora_rank=2), head=model.get_output_embeddings(), seed=0)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


@pytest.fixture
def pefts(model_folder: Path, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """An adapter that peft has saved, and the logits of the model with it."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    theirs = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            if ".lora_B." in name:
                param.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
        theirs.save_pretrained(tmp_path)
        return tmp_path, theirs.eval()(torch.arange(9)[None]).logits


def started(model_folder: Path, adapter: Path, **changes: object) -> nn.Module:
    settings = {"lora_rank": 2, "lora_alpha": 6.0, "target_modules": ["q_proj", "down_proj"], **changes}
    config = ModelConfig(path=str(model_folder), lora_adapter_path=str(adapter), **settings)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    add_lora(model, config, head=model.get_output_embeddings(), seed=0)
    load_adapter(model, config, "policy")
    return model.eval()


@torch.no_grad()
def test_it_starts_from_an_adapter_of_pefts(model_folder: Path, pefts: tuple[Path, torch.Tensor]) -> None:
    folder, expected = pefts
    model, ids = started(model_folder, folder), torch.arange(9)[None]
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-6)
    set_adapters(model, False)
    assert (model(ids).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_alpha": 8.0}, r"model\.lora_alpha=8\.0 must be 6"),
        ({"lora_rank": 4}, r"model\.lora_rank=4 must be 2"),
        ({"target_modules": ["q_proj"]}, r"model\.target_modules selects other layers .*down_proj"),
    ],
)
def test_settings_that_are_not_the_adapters(
    model_folder: Path, pefts: tuple[Path, torch.Tensor], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        started(model_folder, pefts[0], **changes)


def test_an_adapter_of_another_kind_or_none(model_folder: Path, pefts: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    settings = json.loads((pefts[0] / "adapter_config.json").read_text())
    (pefts[0] / "adapter_config.json").write_text(json.dumps(settings | {"use_rslora": True}))
    with pytest.raises(ConfigError, match="use_rslora=True, and only plain LoRA"):
        started(model_folder, pefts[0])
    with pytest.raises(ConfigError, match=r"no adapter in peft's format: .*adapter_config\.json"):
        started(model_folder, tmp_path / "none")
