"""vLLM's live parameters as views under Hugging Face names.

vLLM fuses query, key and value projections, and gate and up projections, and gives each tensor-parallel rank a slice.
This mapping is written from the layers' geometry and not from vLLM's loader, so reading back through it checks the loader.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rlhub.engines.rollout.base import WeightSlice
from rlhub.errors import EngineError

NamedSlice = tuple[str, Tensor, WeightSlice]

QKV_PARTS = ("q_proj", "k_proj", "v_proj")
GATE_UP_PARTS = ("gate_proj", "up_proj")


def live_weights(model: nn.Module) -> Iterator[NamedSlice]:
    """(name, view, slice of the full tensor) of every parameter of this rank; a tied weight comes once.

    Raises EngineError for a kind of layer whose geometry is not known here.
    """
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf == "weight" and _is_tied_head(model, path, parameter):
                continue
            yield from _parts(path, leaf, module, parameter.detach())


def _is_tied_head(model: nn.Module, path: str, parameter: Tensor) -> bool:
    return path == "lm_head" and parameter is model.get_parameter("model.embed_tokens.weight")


def _parts(path: str, leaf: str, module: nn.Module, parameter: Tensor) -> Iterator[NamedSlice]:
    name = f"{path}.{leaf}"
    if isinstance(module, QKVParallelLinear):
        yield from _qkv(path, leaf, module, parameter)
    elif isinstance(module, MergedColumnParallelLinear):
        yield from _gate_up(path, leaf, module, parameter)
    elif isinstance(module, ColumnParallelLinear):
        size = parameter.shape[0]
        yield name, parameter, _rows(module.tp_rank * size, size)
    elif isinstance(module, RowParallelLinear):
        size = parameter.shape[-1]
        start = module.tp_rank * size
        whole = leaf == "bias" or module.tp_size == 1
        yield name, parameter, WeightSlice() if whole else WeightSlice(dim=1, start=start, stop=start + size)
    elif isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        size = shard.org_vocab_end_index - shard.org_vocab_start_index  # what follows is padding
        yield name, parameter[:size], _rows(shard.org_vocab_start_index, size)
    elif isinstance(module, (RMSNorm, ReplicatedLinear, nn.Linear, nn.LayerNorm)):
        yield name, parameter, WeightSlice()
    else:
        raise EngineError(f"cannot read back {name}: the layout of {type(module).__name__} is not known to the weight check")


def _rows(start: int, size: int) -> WeightSlice:
    return WeightSlice(dim=0, start=start, stop=start + size)


def _qkv(path: str, leaf: str, module: QKVParallelLinear, parameter: Tensor) -> Iterator[NamedSlice]:
    """Heads are dealt out in order; where there are fewer key-value heads than ranks, neighbours hold the same one."""
    prefix = _unfused_prefix(path, "qkv_proj")
    query = module.num_heads * module.head_size
    key, value = module.num_kv_heads * module.head_size, module.num_kv_heads * module.v_head_size
    kv_rank = module.tp_rank // module.num_kv_head_replicas
    offset = 0
    for part, size, rank in zip(QKV_PARTS, (query, key, value), (module.tp_rank, kv_rank, kv_rank), strict=True):
        yield f"{prefix}{part}.{leaf}", parameter[offset : offset + size], _rows(rank * size, size)
        offset += size


def _gate_up(path: str, leaf: str, module: MergedColumnParallelLinear, parameter: Tensor) -> Iterator[NamedSlice]:
    prefix = _unfused_prefix(path, "gate_up_proj")
    offset = 0
    for part, full in zip(GATE_UP_PARTS, module.output_sizes, strict=True):
        size = full // module.tp_size
        yield f"{prefix}{part}.{leaf}", parameter[offset : offset + size], _rows(module.tp_rank * size, size)
        offset += size


def _unfused_prefix(path: str, fused: str) -> str:
    if not path.endswith(fused):
        raise EngineError(f"cannot read back {path}: only layers named {fused} are known to be made of separate weights")
    return path.removesuffix(fused)
