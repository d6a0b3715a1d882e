from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlhub.models.experts import unfused, unfused_tensors
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
