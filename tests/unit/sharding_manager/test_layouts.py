"""Analytic layouts: complete, without padding, and where the backends' geometry is special, as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhub.protocol.weights.pieces import Region, num_elements, take, whole
from tests.support.layouts import (
    DecoderShape,
    Layout,
    fsdp_layout,
    full_layout,
    megatron_layout,
    num_parameters,
    shapes,
    vllm_layout,
    weights,
)

DENSE = DecoderShape(
    vocab_size=67, hidden_size=8, intermediate_size=16, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=4, qkv_bias=True
)
MOE = replace(DENSE, num_experts=8, moe_intermediate_size=4, num_dense_layers=1, num_kv_heads=4, qkv_bias=False, qk_norm=True)


def held(layout: Layout, name: str) -> list[list[Region]]:
    """For each rank its regions of a tensor."""
    return [[piece.region for piece in pieces if piece.name == name] for pieces in layout]


def counts(layout: Layout) -> dict[str, Tensor]:
    """How many ranks hold each element."""
    found: dict[str, Tensor] = {}
    for pieces in layout:
        for piece in pieces:
            take(found.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.int64)), piece.region).add_(1)
    return found


@pytest.mark.parametrize(
    ("model", "layout", "copies"),
    [
        (DENSE, full_layout(shapes(DENSE), 3), 3),
        (DENSE, fsdp_layout(shapes(DENSE), 3, replicas=2), 2),
        (DENSE, megatron_layout(DENSE, tp=2, pp=2, dp=3, vpp=2, vocab_multiple=64), 3),
        (DENSE, vllm_layout(DENSE, tp=2, replicas=2), 2),
        (MOE, megatron_layout(MOE, tp=2, pp=2, dp=4, ep=2), 4),
        (MOE, megatron_layout(MOE, tp=4, pp=4, dp=2, ep=8, expert_tp=1), 2),
        (MOE, vllm_layout(MOE, tp=4), 1),
        (MOE, vllm_layout(MOE, tp=2, ep=4, replicas=2), 4),
    ],
    ids=["full", "fsdp", "megatron", "vllm", "megatron moe", "megatron moe, whole experts", "vllm moe", "vllm moe, ep"],
)
def test_every_element_is_held_by_the_number_of_replicas(model: DecoderShape, layout: Layout, copies: int) -> None:
    """Experts may have fewer copies (they are dealt over data-parallel ranks), what is not cut has more."""
    found = counts(layout)
    assert {name: tuple(count.shape) for name, count in found.items()} == shapes(model)
    assert sum(count.numel() for count in found.values()) == num_parameters(model)
    for weight in weights(model):
        count = found[weight.name]
        assert int(count.min()) == int(count.max()) >= 1, weight.name
        if weight.expert is None and weight.cut != "whole":
            assert int(count.max()) == copies, weight.name


def test_tensors_are_the_checkpoints_of_the_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=67, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1
    )
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes(replace(DENSE, num_heads=2, num_kv_heads=1)) == expected


def test_fsdp_rows_are_torch_chunks() -> None:
    regions = held(fsdp_layout({"w": (10, 3)}, 4), "w")
    chunks = torch.arange(10).chunk(4)
    assert [region[0][0] for region in regions] == [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in chunks]
    assert [region[0][0] for region in held(fsdp_layout({"w": (5, 3)}, 4), "w")] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_megatron_holds_query_groups_halves_and_no_padding() -> None:
    layout = megatron_layout(DENSE, tp=2, vocab_multiple=8)
    query, key = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    assert held(layout, query) == [[((0, 16), (0, 8))], [((16, 32), (0, 8))]]
    assert held(layout, key) == [[((0, 4), (0, 8))], [((4, 8), (0, 8))]]
    assert held(layout, "model.layers.0.mlp.down_proj.weight") == [[((0, 8), (0, 8))], [((0, 8), (8, 16))]]
    assert held(layout, "lm_head.weight") == [[((0, 36), (0, 8))], [((36, 67), (0, 8))]]  # 67 padded to 72
    (groups,) = held(megatron_layout(DENSE, tp=1), query)
    assert groups == [((0, 16), (0, 8)), ((16, 32), (0, 8))]  # two query groups are two pieces of a fused weight


def test_megatron_deals_layers_in_turn_and_experts_over_data_ranks() -> None:
    name = "model.layers.{}.input_layernorm.weight"
    plain, turned = megatron_layout(DENSE, tp=1, pp=2), megatron_layout(DENSE, tp=1, pp=2, vpp=2)
    has = lambda layout: [[bool(regions) for regions in held(layout, name.format(i))] for i in range(4)]  # noqa: E731
    first, second = [True, False], [False, True]
    assert has(plain) == [first, first, second, second] and has(turned) == [first, second, first, second]
    experts = megatron_layout(MOE, tp=2, dp=4, ep=2)  # rank = tensor rank + 2 * data rank
    up = [held(experts, f"model.layers.1.mlp.experts.{i}.up_proj.weight") for i in (3, 4)]
    low, high = [((0, 2), (0, 8))], [((2, 4), (0, 8))]
    assert up[0] == [low, high, [], [], low, high, [], []] and up[1] == [[], [], low, high, [], [], low, high]


def test_a_tied_weight_is_at_both_ends_of_the_pipeline() -> None:
    tied = replace(DENSE, tied=True)
    assert "lm_head.weight" not in shapes(tied)
    assert [bool(regions) for regions in held(megatron_layout(tied, tp=1, pp=3), "model.embed_tokens.weight")] == [
        True,
        False,
        True,
    ]


def test_vllm_repeats_scarce_key_value_heads_and_deals_whole_experts() -> None:
    layout = vllm_layout(DENSE, tp=4)
    rows = [region[0][0] for region in held(layout, "model.layers.0.self_attn.v_proj.weight")]
    assert rows == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert [len(regions) for regions in held(layout, "lm_head.weight")] == [1, 1, 1, 0]  # 67 padded to 128, 32 a rank
    assert held(layout, "lm_head.weight")[2] == [((64, 67), (0, 8))]
    expert = held(vllm_layout(MOE, tp=2, ep=4, replicas=2), "model.layers.1.mlp.experts.5.up_proj.weight")
    assert expert == [[], [], [whole((4, 8))], [], [], [], [whole((4, 8))], []]
    cut = held(vllm_layout(MOE, tp=2), "model.layers.1.mlp.experts.5.down_proj.weight")
    assert cut == [[((0, 8), (0, 2))], [((0, 8), (2, 4))]]


def test_sizes_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 tensor-parallel ranks cannot share 2 key-value heads"):
        megatron_layout(DENSE, tp=3)
    with pytest.raises(AssertionError, match="a multiple of 2"):
        vllm_layout(MOE, tp=2, ep=3)


def test_no_piece_is_empty_outside_fsdp() -> None:
    for layout in (megatron_layout(MOE, tp=4, vocab_multiple=64), vllm_layout(MOE, tp=4)):
        assert all(num_elements(piece.region) for pieces in layout for piece in pieces)
