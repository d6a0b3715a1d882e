"""What routers choose is recorded and replaced; tests/integration/test_router_replay.py compares whole engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlhub.errors import EngineError
from rlhub.models.routers import OWN, choice_dtype, recording, replay_in, routers_of

IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture
def model() -> nn.Module:
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
    built: nn.Module = AutoModelForCausalLM.from_config(config)
    return built


def test_the_choices_of_the_last_pass_are_recorded(model: nn.Module) -> None:
    with recording(model) as chosen:
        model(IDS[:, :3])
        logits = model(IDS).logits
        found = chosen()
    assert found.shape == (5, 2 * 2) and found.dtype == torch.uint8
    replay = replay_in(model)
    assert replay is not None and len(routers_of(model)) == 2
    replay.load(found.short())
    assert torch.equal(model(IDS).logits, logits)


def test_given_experts_are_taken_and_the_router_learns(model: nn.Module) -> None:
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


def test_experts_of_another_model_are_refused(model: nn.Module) -> None:
    replay = replay_in(model)
    assert replay is not None
    for shape in ((5, 6), (4, 4)):
        replay.load(torch.zeros(shape, dtype=torch.int16))
        with pytest.raises(EngineError, match="the model that generated is another one"):
            model(IDS)
    assert replay_in(nn.Linear(2, 2)) is None


def test_the_narrowest_numbers() -> None:
    assert (choice_dtype(256), choice_dtype(257)) == (torch.uint8, torch.int16)
