"""vLLM's live weights: written through its own loader, read back as views, and reachable inside its worker processes.

vLLM fuses query, key and value projections, and gate and up projections, and gives each tensor-parallel rank a slice.  The
mapping back to Hugging Face names follows the geometry of the layers and not vLLM's loader, so it checks the loader.

`load_weights` and `live_weights` also serve an engine in this process.  Where the model lives in vLLM's worker processes, vLLM
imports this module in each of them before it builds the model (`worker_extension_cls`), and WorkerExtension receives the
calls.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
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

from rlhub.engines.rollout.base import WeightBucket, apply_buckets
from rlhub.engines.rollout.vllm.environment import end_with_owner, owner_pid
from rlhub.engines.rollout.vllm.internals import keep_weights_unpacked
from rlhub.errors import EngineError, RlhubError
from rlhub.models.required_weights import refuse_nonfinite
from rlhub.protocol.weights.pieces import Piece, whole_piece

QKV_PARTS = ("q_proj", "k_proj", "v_proj")
GATE_UP_PARTS = ("gate_proj", "up_proj")


class WorkerExtension:
    """A mixin of vLLM's worker class, which adds a method for collective_rpc to call."""

    def rlhub_call(self, target: str, method: str, arguments: bytes) -> bytes:
        """Calls a method of this worker's one object of the class `target` ("module:Class"), which is built from WorkerWeights
        on first use.

        arguments: the pickled tuple of the method's arguments.  Returns a pickled pair of result and error, one of which is
        None.
        """
        try:
            value = getattr(self._rlhub_object(target), method)(*pickle.loads(arguments))
        except RlhubError as error:
            return pickle.dumps((None, error))
        return pickle.dumps((value, None))

    def _rlhub_object(self, target: str) -> Any:
        objects: dict[str, Any] = self.__dict__.setdefault("_rlhub_objects", {})
        if target not in objects:
            module, _, name = target.partition(":")
            factory: Callable[[WorkerWeights], Any] = getattr(importlib.import_module(module), name)
            objects[target] = factory(WorkerWeights(self.get_model()))  # type: ignore[attr-defined]
        return objects[target]


class LoadedWeights:
    """Checks, in each worker, the weights that it has loaded from the model's folder."""

    def __init__(self, weights: WorkerWeights) -> None:
        self._weights = weights

    def check(self, path: str) -> None:
        """Raises ConfigError if a weight is not finite."""
        refuse_nonfinite(path, ((piece.name, piece.tensor) for piece in self._weights.live_weights()))


class WorkerWeights:
    """The part of a rollout engine's interface that a weight reader needs, for one worker's part of the model.

    The reader has paused the engine before it writes.  The engine itself keeps its version and whether it is ready.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._dtypes = {piece.name: piece.tensor.dtype for piece in self.live_weights()}

    def live_weights(self) -> Iterator[Piece]:
        return live_weights(self._model)

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Writes a whole stream of full tensors; each worker takes its own part of them."""
        apply_buckets(buckets, self._dtypes, lambda bucket: load_weights(self._model, bucket))

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        yield

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Does nothing, because workers never sleep."""


def load_weights(model: nn.Module, bucket: WeightBucket) -> None:
    """Writes full tensors with Hugging Face names into the model; each rank takes its own part of them."""
    loader: Any = model.load_weights  # all of vLLM's models have this method, though nn.Module does not
    loader(iter(bucket))


def live_weights(model: nn.Module) -> Iterator[Piece]:
    """Yields a view of every parameter of this rank with its region of the full tensor; a tied weight is yielded once.

    Raises EngineError for a layer whose geometry is not known here.
    """
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf == "weight" and _is_tied_head(model, path, parameter):
                continue
            yield from _parts(path, leaf, module, parameter.detach())


def _is_tied_head(model: nn.Module, path: str, parameter: Tensor) -> bool:
    return path == "lm_head" and parameter is model.get_parameter("model.embed_tokens.weight")


def _parts(path: str, leaf: str, module: nn.Module, parameter: Tensor) -> Iterator[Piece]:
    name = f"{path}.{leaf}"
    if isinstance(module, QKVParallelLinear):
        yield from _qkv(path, leaf, module, parameter)
    elif isinstance(module, MergedColumnParallelLinear):
        yield from _gate_up(path, leaf, module, parameter)
    elif isinstance(module, ColumnParallelLinear):
        yield _part(name, parameter, 0, module.tp_rank * parameter.shape[0], parameter.shape[0] * module.tp_size)
    elif isinstance(module, RowParallelLinear) and leaf == "weight":
        yield _part(name, parameter, 1, module.tp_rank * parameter.shape[1], parameter.shape[1] * module.tp_size)
    elif isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        size = shard.org_vocab_end_index - shard.org_vocab_start_index  # what follows is padding
        if size:
            yield _part(name, parameter[:size], 0, shard.org_vocab_start_index, module.org_vocab_size)
    elif isinstance(module, (RMSNorm, RowParallelLinear, ReplicatedLinear, nn.Linear, nn.LayerNorm)):
        yield whole_piece(name, parameter)
    else:
        raise EngineError(f"cannot read back {name}: the layout of {type(module).__name__} is not known to the weight check")


def _part(name: str, view: Tensor, dim: int, start: int, full: int) -> Piece:
    """Returns the piece of a tensor whose dimension `dim` has `full` elements, of which `view` has those from `start` on."""
    shape = (*view.shape[:dim], full, *view.shape[dim + 1 :])
    region = tuple((start, start + size) if axis == dim else (0, size) for axis, size in enumerate(view.shape))
    return Piece(name=name, tensor=view, shape=shape, region=region)


def _qkv(path: str, leaf: str, module: QKVParallelLinear, parameter: Tensor) -> Iterator[Piece]:
    """Takes a fused projection apart.  Heads are assigned to ranks in order; where there are fewer key-value heads than ranks,
    neighbouring ranks have the same one."""
    prefix = _unfused_prefix(path, "qkv_proj")
    query = module.num_heads * module.head_size
    key, value = module.num_kv_heads * module.head_size, module.num_kv_heads * module.v_head_size
    kv_rank, kv_ranks = module.tp_rank // module.num_kv_head_replicas, module.tp_size // module.num_kv_head_replicas
    places = ((query, module.tp_rank, module.tp_size), (key, kv_rank, kv_ranks), (value, kv_rank, kv_ranks))
    offset = 0
    for part, (size, rank, ranks) in zip(QKV_PARTS, places, strict=True):
        yield _part(f"{prefix}{part}.{leaf}", parameter[offset : offset + size], 0, rank * size, ranks * size)
        offset += size


def _gate_up(path: str, leaf: str, module: MergedColumnParallelLinear, parameter: Tensor) -> Iterator[Piece]:
    prefix = _unfused_prefix(path, "gate_up_proj")
    offset = 0
    for part, full in zip(GATE_UP_PARTS, module.output_sizes, strict=True):
        size = full // module.tp_size
        yield _part(f"{prefix}{part}.{leaf}", parameter[offset : offset + size], 0, module.tp_rank * size, full)
        offset += size


def _unfused_prefix(path: str, fused: str) -> str:
    if not path.endswith(fused):
        raise EngineError(f"cannot read back {path}: only layers named {fused} are known to be made of separate weights")
    return path.removesuffix(fused)


if owner_pid() is not None:
    keep_weights_unpacked()
    end_with_owner()
