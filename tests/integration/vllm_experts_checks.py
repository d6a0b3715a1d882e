"""Experts in vLLM's layout, on every rank of a tensor or expert parallel engine: vLLM's own loader writes, the weight map reads.

The layers are vLLM's, without a device and without a process group, since each rank is told its place.  test_rollout_vllm.py runs
these tests in a process of their own, because importing vLLM changes one for good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlhub.engines.rollout.vllm import environment  # noqa: F401  # before vLLM, for which it sets variables

# isort: split
from rlhub.engines.rollout.vllm import conversion
from rlhub.engines.rollout.vllm.worker import live_weights
from rlhub.errors import EngineError
from rlhub.protocol.weights.fingerprint import fingerprint
from rlhub.protocol.weights.pieces import Piece, take

# isort: split
from vllm import CompletionOutput, EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

EXPERTS, HIDDEN, WIDTH, TOP = 5, 32, 64, 2
PREFIX = "model.layers.0.mlp.experts"
PROJECTIONS = {"gate_proj": ("w13_weight", "w1"), "up_proj": ("w13_weight", "w3"), "down_proj": ("w2_weight", "w2")}
LAYOUTS = {"whole": (1, 1), "tensor parallel": (2, 1), "expert parallel": (1, 2)}  # (tensor, expert parallel ranks)


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def full() -> dict[str, Tensor]:
    """The checkpoint's weights of one layer."""
    torch.manual_seed(3)
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    return {f"{PREFIX}.{expert}.{name}.weight": torch.randn(shape) for expert in range(EXPERTS) for name, shape in shapes.items()}


class Layer(nn.Module):
    """A model whose only weights are one layer's experts."""

    def __init__(self, experts: RoutedExperts) -> None:
        super().__init__()
        parent: nn.Module = self
        for name in PREFIX.split("."):
            child = nn.Module()
            parent.add_module(name, child)
            parent = child
        parent.add_module("routed_experts", experts)


def layer(tp: int, ep: int, rank: int) -> Layer:
    parallel = FusedMoEParallelConfig(
        tp_size=tp,
        tp_rank=rank if tp > 1 else 0,
        ep_size=ep,
        ep_rank=rank if ep > 1 else 0,
        use_ep=ep > 1,
        pcp_size=1,
        dp_size=1,
        pcp_rank=0,
        dp_rank=0,
        sp_size=1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    manager = ExpertMapManager(64, TOP, EXPERTS, 0, None, parallel, "linear", False)
    config = FusedMoEConfig(
        num_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        num_local_experts=manager.local_num_experts,
        experts_per_token=TOP,
        hidden_dim=HIDDEN,
        intermediate_size=WIDTH,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.float32,
    )
    return Layer(RoutedExperts("experts", torch.float32, config, None, manager))


def experts_of(model: Layer) -> RoutedExperts:
    return next(module for module in model.modules() if isinstance(module, RoutedExperts))


def loaded(tp: int, ep: int, rank: int, full: dict[str, Tensor]) -> Layer:
    model = layer(tp, ep, rank)
    experts = experts_of(model)
    for name, tensor in full.items():
        *_, expert, projection, _ = name.split(".")
        leaf, shard = PROJECTIONS[projection]
        experts.weight_loader(getattr(experts, leaf), tensor, name, shard, int(expert))
    return model


def wrong(model: nn.Module, full: dict[str, Tensor]) -> set[str]:
    """The names of live weights whose fingerprint is not that of the checkpoint's part."""

    def differs(piece: Piece) -> bool:
        part = take(full[piece.name], piece.region)
        return fingerprint(piece.tensor) != fingerprint(part)

    return {piece.name for piece in live_weights(model) if differs(piece)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_its_part_of_every_expert(layout: str, full: dict[str, Tensor]) -> None:
    tp, ep = LAYOUTS[layout]
    covered = dict.fromkeys(full, 0)
    for rank in range(tp * ep):
        model = loaded(tp, ep, rank, full)
        pieces = list(live_weights(model))
        assert all(torch.equal(piece.tensor, take(full[piece.name], piece.region)) for piece in pieces)
        assert wrong(model, full) == set()
        for piece in pieces:
            assert piece.shape == full[piece.name].shape
            covered[piece.name] += piece.tensor.numel()
    assert covered == {name: tensor.numel() for name, tensor in full.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_exchanged_is_named(layout: str, full: dict[str, Tensor]) -> None:
    """Two experts, or the gate and the up projection of one: the values are all there, in the wrong place."""
    tp, ep = LAYOUTS[layout]
    model = loaded(tp, ep, 0, full)
    gate_up = experts_of(model).w13_weight.data
    gate_up[[0, 1]] = gate_up[[1, 0]]
    assert wrong(model, full) == {f"{PREFIX}.{expert}.{name}.weight" for expert in (0, 1) for name in ("gate_proj", "up_proj")}
    model = loaded(tp, ep, 0, full)
    gate_up = experts_of(model).w13_weight.data
    gate_up[0] = gate_up[0].roll(gate_up.shape[1] // 2, 0)
    assert wrong(model, full) == {f"{PREFIX}.0.gate_proj.weight", f"{PREFIX}.0.up_proj.weight"}


def test_a_bias_of_experts_is_refused(full: dict[str, Tensor]) -> None:
    model = loaded(1, 1, 0, full)
    experts_of(model).register_parameter("w13_bias", nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH)))
    with pytest.raises(EngineError, match=r"w13_bias: of experts only"):
        list(live_weights(model))


@pytest.mark.parametrize(("given", "ours"), [(np.uint8, torch.uint8), (np.uint16, torch.int16)])
def test_recorded_experts_are_those_of_layers_with_experts(given: type, ours: torch.dtype) -> None:
    """vLLM has a place for each layer; the second of these three has no experts."""
    recorded = np.arange(12, dtype=given).reshape(2, 3, 2)
    parts = {"index": 0, "text": "", "token_ids": [1], "cumulative_logprob": None, "logprobs": None}
    found = conversion.experts_of(CompletionOutput(**parts, routed_experts=recorded), [0, 2])
    assert found.tolist() == [[0, 1, 4, 5], [6, 7, 10, 11]] and found.dtype == ours
    with pytest.raises(EngineError, match="no experts of a completion's tokens"):
        conversion.experts_of(CompletionOutput(**parts), [0, 2])
    assert "enable_return_routed_experts" in {field.name for field in dataclasses.fields(EngineArgs)}
