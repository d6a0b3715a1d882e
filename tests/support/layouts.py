"""Layouts of decoder models without their weights: what each rank of a backend holds, from sizes alone.

Written from the backends' geometry, not from our engines: plans for clusters that are not there, and an independent view of
the ones that are.  A layout is a list with one list of pieces a rank, as the planner takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from rlhub.protocol.weights.pieces import PieceInfo, Region, num_elements, whole

Layout = list[list[PieceInfo]]
Cut = Literal["whole", "rows", "columns", "queries", "keys", "vocabulary"]
Range = tuple[int, int]

VLLM_VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this before it deals out rows


@dataclass(slots=True, kw_only=True, frozen=True)
class DecoderShape:
    """The sizes of a decoder-only transformer, dense or (`num_experts` > 0) a mixture of experts after its first dense layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    moe_intermediate_size: int = 0
    num_dense_layers: int = 0
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


@dataclass(slots=True, kw_only=True, frozen=True)
class Weight:
    """A tensor of the checkpoint and how tensor parallelism cuts it.

    layer: None for the embedding and what follows the last layer.  expert: its index; None for what every token passes.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut
    layer: int | None = None
    expert: int | None = None


def weights(model: DecoderShape) -> Iterator[Weight]:
    """Yields every tensor of the model under its checkpoint name."""
    table = (model.vocab_size, model.hidden_size)
    yield Weight(name="model.embed_tokens.weight", shape=table, cut="vocabulary")
    for layer in range(model.num_layers):
        yield from _attention(model, layer)
        prefix = f"model.layers.{layer}.mlp"
        if layer < model.num_dense_layers or not model.num_experts:
            yield from _mlp(prefix, model.hidden_size, model.intermediate_size, layer, None)
            continue
        yield Weight(name=f"{prefix}.gate.weight", shape=(model.num_experts, model.hidden_size), cut="whole", layer=layer)
        for expert in range(model.num_experts):
            yield from _mlp(f"{prefix}.experts.{expert}", model.hidden_size, model.moe_intermediate_size, layer, expert)
    yield Weight(name="model.norm.weight", shape=(model.hidden_size,), cut="whole")
    if not model.tied:
        yield Weight(name="lm_head.weight", shape=table, cut="vocabulary")


def _attention(model: DecoderShape, layer: int) -> Iterator[Weight]:
    prefix, hidden = f"model.layers.{layer}", model.hidden_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    projections: tuple[tuple[str, int, Cut], ...] = (("q", queries, "queries"), ("k", keys, "keys"), ("v", keys, "keys"))
    for part, rows, cut in projections:
        yield Weight(name=f"{prefix}.self_attn.{part}_proj.weight", shape=(rows, hidden), cut=cut, layer=layer)
        if model.qkv_bias:
            yield Weight(name=f"{prefix}.self_attn.{part}_proj.bias", shape=(rows,), cut=cut, layer=layer)
    yield Weight(name=f"{prefix}.self_attn.o_proj.weight", shape=(hidden, queries), cut="columns", layer=layer)
    if model.qk_norm:
        for part in "qk":
            yield Weight(name=f"{prefix}.self_attn.{part}_norm.weight", shape=(model.head_dim,), cut="whole", layer=layer)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Weight(name=f"{prefix}.{norm}.weight", shape=(hidden,), cut="whole", layer=layer)


def _mlp(prefix: str, hidden: int, width: int, layer: int, expert: int | None) -> Iterator[Weight]:
    for part in ("gate", "up"):
        yield Weight(name=f"{prefix}.{part}_proj.weight", shape=(width, hidden), cut="rows", layer=layer, expert=expert)
    yield Weight(name=f"{prefix}.down_proj.weight", shape=(hidden, width), cut="columns", layer=layer, expert=expert)


def shapes(model: DecoderShape) -> dict[str, tuple[int, ...]]:
    return {weight.name: weight.shape for weight in weights(model)}


def num_parameters(model: DecoderShape) -> int:
    return sum(num_elements(whole(weight.shape)) for weight in weights(model))


def full_layout(tensors: Mapping[str, tuple[int, ...]], ranks: int, *, dtype: torch.dtype = torch.bfloat16) -> Layout:
    """Returns the layout in which every rank holds the whole model."""
    pieces = [PieceInfo(name=name, shape=shape, region=whole(shape), dtype=dtype) for name, shape in tensors.items()]
    return [pieces] * ranks


def fsdp_layout(
    tensors: Mapping[str, tuple[int, ...]], ranks: int, *, replicas: int = 1, dtype: torch.dtype = torch.float32
) -> Layout:
    """Returns FSDP's layout, `replicas` groups of `ranks`: rows in equal blocks, the last ones shorter or empty (torch.chunk)."""
    group: Layout = [[] for _ in range(ranks)]
    for name, shape in tensors.items():
        for rank, pieces in enumerate(group):
            if shape:
                block = -(-shape[0] // ranks)
                rows = (min(rank * block, shape[0]), min((rank + 1) * block, shape[0]))
                pieces.append(PieceInfo(name=name, shape=shape, region=(rows, *whole(shape[1:])), dtype=dtype))
            else:
                pieces.append(PieceInfo(name=name, shape=shape, region=(), dtype=dtype))
    return group * replicas


def megatron_layout(
    model: DecoderShape,
    *,
    tp: int,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    vpp: int = 1,
    expert_tp: int | None = None,
    vocab_multiple: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Layout:
    """Returns Megatron-core's layout: rank = tensor rank + tp * (data rank + dp * pipeline stage).

    Experts are dealt over the ranks of a stage that tensor parallelism of experts (`expert_tp`, by default tp) leaves.
    Query, key and value rows are one piece a query group, for they are fused by group; padded vocabulary rows are no piece.
    """
    expert_tp = tp if expert_tp is None else expert_tp
    assert model.num_kv_heads % tp == 0, f"{tp} tensor-parallel ranks cannot share {model.num_kv_heads} key-value heads"
    assert tp * dp % (expert_tp * ep) == 0, f"{tp * dp} ranks of a stage are no multiple of {expert_tp} x {ep} for experts"
    assert not model.num_experts % ep, f"{model.num_experts} experts cannot be dealt to {ep} ranks"
    stages = _pipeline(model, pp, vpp)
    layout: Layout = []
    for stage in stages:
        dense = [_megatron_dense(model, stage, rank, tp, vocab_multiple, dtype) for rank in range(tp)]
        experts = [
            _experts(stage, *divmod(i, expert_tp), model.num_experts // ep, expert_tp, dtype) for i in range(ep * expert_tp)
        ]
        layout += [dense[rank % tp] + experts[rank % (ep * expert_tp)] for rank in range(tp * dp)]
    return layout


def _pipeline(model: DecoderShape, pp: int, vpp: int) -> list[list[Weight]]:
    """Returns each pipeline stage's weights: chunks of layers dealt in turn; the first has the embedding, the last the head."""
    stage_of: list[int] = []
    for chunk in range(pp * vpp):
        start, stop = _balanced(model.num_layers, chunk, pp * vpp)
        stage_of += [chunk % pp] * (stop - start)
    stages: list[list[Weight]] = [[] for _ in range(pp)]
    for weight in weights(model):
        if weight.layer is not None:
            stages[stage_of[weight.layer]].append(weight)
            continue
        first = weight.name == "model.embed_tokens.weight"
        stages[0 if first else -1].append(weight)
        if first and model.tied and pp > 1:
            stages[-1].append(weight)
    return stages


def _balanced(count: int, index: int, parts: int) -> Range:
    """Returns part `index` of `count` in order: sizes differ by at most one, larger ones first."""
    size, extra = divmod(count, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def _megatron_dense(
    model: DecoderShape, stage: list[Weight], rank: int, tp: int, vocab_multiple: int, dtype: torch.dtype
) -> list[PieceInfo]:
    """Returns what a tensor-parallel rank holds of all but the experts."""
    groups = range(rank * model.num_kv_heads // tp, (rank + 1) * model.num_kv_heads // tp)
    pieces = []
    for weight in stage:
        if weight.expert is not None:
            continue
        if weight.cut in ("queries", "keys"):
            size = weight.shape[0] // model.num_kv_heads
            regions = [_rows(weight.shape, group * size, (group + 1) * size) for group in groups]
        else:
            regions = [_part(weight.shape, weight.cut, rank, tp, vocab_multiple)]
        pieces += [PieceInfo(name=weight.name, shape=weight.shape, region=region, dtype=dtype) for region in regions]
    return [piece for piece in pieces if num_elements(piece.region)]


def _experts(stage: list[Weight], ep_rank: int, tp_rank: int, num_local: int, tp: int, dtype: torch.dtype) -> list[PieceInfo]:
    """Returns what a rank holds of the experts, which are dealt in blocks."""
    return [
        PieceInfo(name=weight.name, shape=weight.shape, region=_part(weight.shape, weight.cut, tp_rank, tp, 1), dtype=dtype)
        for weight in stage
        if weight.expert is not None and weight.expert // num_local == ep_rank
    ]


def vllm_layout(model: DecoderShape, *, tp: int, ep: int = 1, replicas: int = 1, dtype: torch.dtype = torch.bfloat16) -> Layout:
    """Returns vLLM's layout: a replica is `tp` ranks, or with expert parallelism `ep`, in ep / tp data-parallel groups of tp.

    Fewer key-value heads than ranks: neighbours hold the same one.  ep > 1: whole experts in blocks, else each cut by tp.
    """
    assert ep == 1 or ep % tp == 0, f"expert parallelism {ep} is tensor x data parallelism: a multiple of {tp}"
    table = list(weights(model))
    dense = [_vllm_dense(model, table, rank, tp, dtype) for rank in range(tp)]
    if ep == 1:
        experts = [_experts(table, 0, rank, max(1, model.num_experts), tp, dtype) for rank in range(tp)]
    else:
        assert model.num_experts % ep == 0, f"{model.num_experts} experts cannot be dealt to {ep} ranks"
        experts = [_experts(table, rank, 0, model.num_experts // ep, 1, dtype) for rank in range(ep)]
    replica = [dense[rank % tp] + experts[rank] for rank in range(len(experts))]
    return replica * replicas


def _vllm_dense(model: DecoderShape, table: list[Weight], rank: int, tp: int, dtype: torch.dtype) -> list[PieceInfo]:
    kv_ranks = min(tp, model.num_kv_heads)
    kv_rank = rank * kv_ranks // tp
    pieces = []
    for weight in table:
        if weight.expert is not None:
            continue
        where = (kv_rank, kv_ranks) if weight.cut == "keys" else (rank, tp)
        region = _part(weight.shape, weight.cut, *where, VLLM_VOCABULARY_MULTIPLE)
        pieces.append(PieceInfo(name=weight.name, shape=weight.shape, region=region, dtype=dtype))
    return [piece for piece in pieces if num_elements(piece.region)]


@cache
def _part(shape: tuple[int, ...], cut: Cut, rank: int, ranks: int, vocab_multiple: int) -> Region:
    """Returns the equal part of a rank; of the vocabulary after padding it so that the parts are equal."""
    if cut == "whole":
        return whole(shape)
    dim = 1 if cut == "columns" else 0
    size = shape[dim] // ranks
    if cut == "vocabulary":
        multiple = vocab_multiple if vocab_multiple % ranks == 0 else vocab_multiple * ranks
        size = -(-shape[0] // multiple) * multiple // ranks
        return _rows(shape, min(rank * size, shape[0]), min((rank + 1) * size, shape[0]))
    assert size * ranks == shape[dim], f"{ranks} ranks cannot share {shape[dim]} evenly"
    return tuple((rank * size, (rank + 1) * size) if axis == dim else (0, full) for axis, full in enumerate(shape))


def _rows(shape: tuple[int, ...], start: int, stop: int) -> Region:
    return ((start, stop), *whole(shape[1:]))
