from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhub.config.model import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.lora import LoRALinear, add_lora, set_adapters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(5, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x)))


def adapted(**config: object) -> Block:
    torch.manual_seed(0)
    block = Block()
    add_lora(block, ModelConfig(lora_rank=2, lora_alpha=6.0, **config), head=block.head, seed=1)
    return block


def test_starts_as_the_model_it_adapts_and_trains_adapters_only() -> None:
    torch.manual_seed(0)
    plain, block, x = Block(), adapted(), torch.randn(4, 5)
    assert torch.equal(block(x), plain(x))
    assert {n for n, p in block.named_parameters() if p.requires_grad} == {f"{m}.lora_{s}" for m in ("up", "down") for s in "ab"}
    assert {n for n, _ in plain.named_parameters()} < {n for n, _ in block.named_parameters()}


def test_formula_and_switch() -> None:
    block, x = adapted(), torch.randn(4, 5)
    off = block(x)
    for module in (block.up, block.down):
        nn.init.normal_(module.lora_b)
    assert not torch.allclose(block(x), off)
    merged = Block()
    merged.load_state_dict(block.state_dict(), strict=False)
    for name in ("up", "down"):
        layer = getattr(block, name)
        getattr(merged, name).weight.data = layer.weight + 6.0 / 2 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(block(x), merged(x))
    set_adapters(block, False)
    assert torch.equal(block(x), off)


def test_named_targets() -> None:
    block = adapted(target_modules=["down"])
    assert isinstance(block.down, LoRALinear) and not isinstance(block.up, LoRALinear)
    with pytest.raises(ConfigError, match=r"dwn.*down"):
        adapted(target_modules=["up", "dwn"])
