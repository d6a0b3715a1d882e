from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from rlhub.errors import EngineError
from rlhub.models.experts import OWN, choice_dtype, recording, replay_in, routers_of, unfused, unfused_tensors
from rlhub.protocol.weights.pieces import Piece, Region, take

PREFIX = "model.layers.0.mlp.experts."


def test_names_and_values_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3MoeConfig(**sizes, num_key_value_heads=2, head_dim=4, num_experts=3, moe_intermediate_size=5)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = dict(unfused_tensors((name, param.detach()) for name, param in model.named_parameters()))
    assert sorted(found) == sorted(saved)
    assert len(found) > len(list(model.named_parameters()))
    assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    "region", [((1, 3), (0, 6), (0, 4)), ((0, 1), (2, 5), (1, 3)), ((2, 3), (0, 2), (0, 4)), ((1, 1), (0, 6), (0, 4))]
)
def test_any_part_of_a_fused_tensor_becomes_views_of_the_experts_parts(region: Region) -> None:
    full = torch.arange(3 * 6 * 4.0).view(3, 6, 4)
    wanted = dict(unfused_tensors([(f"{PREFIX}gate_up_proj", full)]))
    part = take(full, region).clone()
    pieces = list(unfused(Piece(name=f"{PREFIX}gate_up_proj", tensor=part, shape=(3, 6, 4), region=region)))
    assert sum(piece.tensor.numel() for piece in pieces) == part.numel()
    for piece in pieces:
        assert piece.shape == (3, 4)
        assert torch.equal(piece.tensor, take(wanted[piece.name], piece.region))
        piece.tensor.zero_()
    assert not part.any(), "they are views"


def test_other_weights_stay_as_they_are() -> None:
    names = ["model.layers.0.mlp.gate_up_proj.weight", f"{PREFIX}0.down_proj.weight", "model.norm.weight"]
    tensors = [(name, torch.ones(2, 3)) for name in names]
    assert [name for name, _ in unfused_tensors(tensors)] == names


IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        mlp_only_layers=[1],
        initializer_range=0.3,
    )
    built: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return built


def test_the_choices_of_the_last_pass_are_recorded(model: PreTrainedModel) -> None:
    with recording(model) as chosen:
        model(IDS[:, :3])
        logits = model(IDS).logits
        found = chosen()
    assert found.shape == (5, 2 * 2) and found.dtype == torch.uint8
    replay = replay_in(model)
    assert replay is not None and len(routers_of(model)) == 2
    replay.load(found.short())
    assert torch.equal(model(IDS).logits, logits)


def test_given_experts_are_taken_and_the_router_learns(model: PreTrainedModel) -> None:
    replay = replay_in(model)
    assert replay is not None
    own = model(IDS).logits
    given = torch.tensor([[0, 1, 2, 3]] * 4 + [[OWN] * 4], dtype=torch.int16)
    replay.load(given)
    with recording(model) as chosen:
        logits = model(IDS).logits
        found = chosen().short()
    assert torch.equal(found[:4], given[:4]) and not torch.allclose(logits, own)
    logits[0, 0].sum().backward()
    weights = [router.weight.grad for router in routers_of(model)]
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in weights)
    replay.load(None)
    assert torch.equal(model(IDS).logits, own)


def test_experts_of_another_model_are_refused(model: PreTrainedModel) -> None:
    replay = replay_in(model)
    assert replay is not None
    for shape in ((5, 6), (4, 4)):
        replay.load(torch.zeros(shape, dtype=torch.int16))
        with pytest.raises(EngineError, match="the model that generated is another one"):
            model(IDS)
    sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert replay_in(AutoModelForCausalLM.from_config(Qwen2Config(**sizes, num_key_value_heads=2))) is None


def test_the_narrowest_numbers() -> None:
    assert (choice_dtype(256), choice_dtype(257)) == (torch.uint8, torch.int16)
