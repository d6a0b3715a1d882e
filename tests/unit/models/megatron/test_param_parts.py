from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlhub.models.megatron import build
from rlhub.protocol.weights.pieces import take

HIDDEN = 3
LAYER = "decoder.layers.1."
KINDS = {"tensor_model_parallel": "tp", "expert_tensor_parallel": "etp", "expert_model_parallel": "ep"}


def parallel(**places: tuple[int, int]) -> Any:
    """Stands for megatron's parallel state: this rank's (rank, size) in each kind of group."""
    state = SimpleNamespace()
    for kind, short in KINDS.items():
        rank, size = places.get(short, (0, 1))
        setattr(state, f"get_{kind}_rank", lambda rank=rank: rank)
        setattr(state, f"get_{kind}_world_size", lambda size=size: size)
    return state


def held(param: Tensor, key: str, config: Any = None, vocab: int = 0, **places: tuple[int, int]) -> list[tuple]:
    """(part, data) of what one rank's parameter holds of layer 5, its own second."""
    layers = [None, SimpleNamespace(layer_number=6)]
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=layers), share_embeddings_and_output_weights=False)
    built: Any = SimpleNamespace(chunks=[chunk], config=config, vocab_size=vocab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "parallel_state", parallel(**places))
        parts = build._PartsOfChunk(built, 0).parts(key, nn.Parameter(param))
    return [(part, take(param, part.local)) for part in parts]


def assembled(pieces: list[tuple]) -> dict[str, Tensor]:
    """Full tensors; NaN where no part was."""
    full: dict[str, Tensor] = {}
    for part, data in pieces:
        target = take(full.setdefault(part.name, torch.full(part.shape, torch.nan)), part.region)
        assert target.isnan().all(), f"{part.name} overlaps"
        target.copy_(data)
    return full


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@settings(max_examples=30, deadline=None)
@given(tp=st.integers(1, 4), own=st.integers(1, 3), queries=st.integers(1, 4), width=st.integers(1, 4), bias=st.booleans())
def test_fused_attention_is_taken_apart_by_groups(tp: int, own: int, queries: int, width: int, bias: bool) -> None:
    groups, rest = tp * own, () if bias else (HIDDEN,)
    query, key, value = random(groups * queries * width, *rest), random(groups * width, *rest), random(groups * width, *rest) + 9
    fused = torch.cat([matrix.view(groups, -1, *rest) for matrix in (query, key, value)], 1).flatten(0, 1)
    config = SimpleNamespace(num_attention_heads=groups * queries, num_query_groups=groups, kv_channels=width)
    entry = "bias" if bias else "weight"
    pieces = [
        piece
        for rank, share in enumerate(fused.chunk(tp))
        for piece in held(share, f"{LAYER}self_attention.linear_qkv.{entry}", config, tp=(rank, tp))
    ]
    found = assembled(pieces)
    assert found.keys() == {f"model.layers.5.self_attn.{matrix}_proj.{entry}" for matrix in "qkv"}
    assert all(
        torch.equal(tensor, found[f"model.layers.5.self_attn.{matrix}_proj.{entry}"])
        for matrix, tensor in zip("qkv", (query, key, value), strict=True)
    )


@settings(max_examples=30, deadline=None)
@given(tp=st.integers(1, 4), vocab=st.integers(1, 20))
def test_padding_of_the_vocabulary_belongs_to_no_part(tp: int, vocab: int) -> None:
    rows = -(-vocab // tp)
    table, padding = random(vocab, HIDDEN), torch.full((rows * tp - vocab, HIDDEN), torch.nan)
    shares = torch.cat((table, padding)).chunk(tp)
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        pieces = [piece for rank, share in enumerate(shares) for piece in held(share, key, vocab=vocab, tp=(rank, tp))]
        assert torch.equal(assembled(pieces)[name], table)


@settings(max_examples=30, deadline=None)
@given(ep=st.integers(1, 3), own=st.integers(1, 3), etp=st.integers(1, 3))
def test_experts_are_numbered_over_their_ranks(ep: int, own: int, etp: int) -> None:
    gate, up, down = random(ep * own, etp * 2, HIDDEN), random(ep * own, etp * 2, HIDDEN) + 9, random(ep * own, HIDDEN, etp * 2)
    config = SimpleNamespace(num_moe_experts=ep * own)
    pieces = []
    for rank in range(ep * etp):
        place, cut = divmod(rank, etp)
        for local in range(own):
            expert = place * own + local
            fused = torch.cat((gate[expert].chunk(etp)[cut], up[expert].chunk(etp)[cut]))
            prefix, places = f"{LAYER}mlp.experts.local_experts.{local}.linear_fc", {"ep": (place, ep), "etp": (cut, etp)}
            pieces += held(fused, f"{prefix}1.weight", config, **places)
            pieces += held(down[expert].chunk(etp, 1)[cut], f"{prefix}2.weight", config, **places)
    found = assembled(pieces)
    assert len(found) == 3 * ep * own
    for expert in range(ep * own):
        for name, tensor in (("gate", gate), ("up", up), ("down", down)):
            assert torch.equal(found[f"model.layers.5.mlp.experts.{expert}.{name}_proj.weight"], tensor[expert])


def test_an_unknown_parameter_is_no_silent_gap() -> None:
    with pytest.raises(AssertionError, match=r"mtp.weight: a parameter that no Hugging Face tensor is known for"):
        held(random(2, 2), "mtp.weight")
