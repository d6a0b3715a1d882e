"""vLLM's live weights: written through its own loader, read back as views, and reachable inside its worker processes.

vLLM fuses query, key and value projections, and gate and up projections, and gives each tensor-parallel rank a slice.  The
mapping back to Hugging Face names follows the geometry of the layers and not vLLM's loader, so it checks the loader.

Quantized weights are written through that mapping too, because vLLM's loader cannot load such parameters again once they are
ready for their kernel.  The kernels that `internals` admits leave weights and scales as a checkpoint has them.

`load_stream` and `live_weights` also serve an engine in this process.  Where the model lives in vLLM's worker processes, vLLM
imports this module in each of them before it builds the model (`worker_extension_cls`), and WorkerExtension receives the
calls.
"""

from __future__ import annotations

import importlib
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
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
from rlhub.engines.rollout.vllm.environment import end_with_owner, owner_pid, settle
from rlhub.engines.rollout.vllm.internals import AdapterPart, adapted_modules, adapter_parts, keep_weights_unpacked, load_adapter
from rlhub.errors import EngineError, RlhubError
from rlhub.models.lora import is_adapted, saved_name
from rlhub.models.required_weights import refuse_nonfinite
from rlhub.protocol.weights.pieces import BLOCK, FP8, Piece, num_blocks, scales_name, take, whole_piece

logger = logging.getLogger(__name__)
FREE_SHARE = 0.05
"""The share of a device's memory that a second set of weights leaves free, because steps of vLLM's may still allocate some."""
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

    def add_adapter(self, rank: int, targets: str | list[str]) -> None:
        """Adds a LoRA adapter of zeros; see `add_adapter` of the module."""
        self._weights.add_adapter(rank, targets)


class WorkerWeights:
    """The part of a rollout engine's interface that a weight reader needs, for one worker's part of the model.

    The reader has paused the engine before it writes.  The engine itself keeps its version and whether it is ready.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._standby = model, StandbyWeights(model)
        self._dtypes = weight_dtypes(model)

    def add_adapter(self, rank: int, targets: str | list[str]) -> None:
        add_adapter(self._model, rank, targets)
        self._dtypes = weight_dtypes(self._model)

    def live_weights(self) -> Iterator[Piece]:
        return live_weights(self._model)

    def standby_weights(self) -> Iterator[Piece] | None:
        return self._standby.pieces()

    def exchange(self) -> None:
        self._standby.exchange()

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Writes a whole stream of full tensors; each worker takes its own part of them."""
        load_stream(self._model, buckets, self._dtypes)

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        yield

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Does nothing, because workers never sleep."""


class StandbyWeights:
    """A second set of a model's weights, which may be written while vLLM generates.

    Where the live weights are on a GPU, the set is there too if the memory suffices, and otherwise in pinned memory of the host.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._memory: dict[nn.Parameter, Tensor] | None = None

    def pieces(self) -> Iterator[Piece] | None:
        """Returns views of the set, laid out as `live_weights`.  Returns None where the memory does not suffice for one, and
        for an adapter, which is small and may as well be copied in the pause."""
        if adapter_parts(self._model):
            return None
        if self._memory is None:
            self._memory = _second_memory(self._model)
        return _parameters(self._model, self._memory) if self._memory else None

    def free(self) -> None:
        """Frees the set, until its pieces are asked for again."""
        self._memory = None

    @torch.no_grad()
    def exchange(self) -> None:
        """Makes the set the live one.  On CPU the two exchange their memory.  On a GPU the set is copied, because captured graphs
        go on with the memory that the weights had."""
        assert self._memory, "its pieces come first"
        device = next(iter(self._memory)).device
        settle(device)
        for parameter, standby in self._memory.items():
            if device.type == "cpu":
                parameter.data, self._memory[parameter] = standby, parameter.data
            else:
                parameter.copy_(standby, non_blocking=True)
        settle(device)


@torch.no_grad()
def _second_memory(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Returns a copy of every parameter, with its padding, or nothing where no memory is free for that."""
    parameters = list(model.parameters())
    num_bytes, device = sum(parameter.nbytes for parameter in parameters), parameters[0].device
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free - num_bytes >= FREE_SHARE * total:
            return {parameter: parameter.detach().clone() for parameter in parameters}
    if psutil.virtual_memory().available < num_bytes:
        logger.warning("no %.1f GB are free for a second set of weights: new ones are copied in the pause", num_bytes / 1e9)
        return {}
    pinned = device.type == "cuda"
    return {p: torch.empty_like(p, device="cpu", pin_memory=pinned).copy_(p) for p in parameters}


def load_stream(model: nn.Module, buckets: Iterable[WeightBucket], expected: Mapping[str, torch.dtype]) -> None:
    """Writes a whole stream of full tensors through vLLM's own loaders; each rank takes its own part of them.

    expected: the names of all weights, as `weight_dtypes` returns them.
    """
    parts = adapter_parts(model)
    if FP8 in expected.values():
        live = {piece.name: piece for piece in live_weights(model)}
        apply_buckets(buckets, expected, lambda bucket: _write(live, bucket))
        return
    if not parts:
        loader: Any = model.load_weights  # all of vLLM's models have this method, though nn.Module does not
        apply_buckets(buckets, expected, lambda bucket: loader(iter(bucket)))
        return
    tensors: dict[str, Tensor] = {}
    apply_buckets(buckets, expected, lambda bucket: tensors.update({name: tensor.clone() for name, tensor in bucket}))
    load_adapter(model, tensors, parts[0].low.shape[0])


def _write(live: Mapping[str, Piece], bucket: WeightBucket) -> None:
    """Writes this rank's part of full tensors into the live weights."""
    for name, tensor in bucket:
        piece = live[name]
        if tuple(tensor.shape) != piece.shape:
            raise EngineError(f"weight {name} has shape {tuple(tensor.shape)}, the engine's has {piece.shape}")
        if piece.tensor.dtype == FP8 != tensor.dtype:
            raise EngineError(f"weight {name} came as {tensor.dtype}: this engine stores it quantized, and takes it so only")
        piece.tensor.copy_(take(tensor, piece.region))


def add_adapter(model: nn.Module, rank: int, targets: str | list[str]) -> None:
    """Adds a LoRA adapter of zeros, which the next updates fill; from then on it alone is the model's weights to these.

    rank, targets: model.lora_rank and model.target_modules.
    """
    tensors: dict[str, Tensor] = {}
    for path, module in adapted_modules(model).items():
        for layer, _, _, full in _outputs(path, module):
            if is_adapted(layer, targets):
                tensors[saved_name(layer, "A")] = torch.zeros(rank, int(module.input_size))
                tensors[saved_name(layer, "B")] = torch.zeros(full, rank)
    load_adapter(model, tensors, rank)


def weight_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Returns the dtype of each weight that an update must bring."""
    return {piece.name: piece.tensor.dtype for piece in live_weights(model)}


def live_weights(model: nn.Module) -> Iterator[Piece]:
    """Yields a view of every weight of this rank that updates bring, with its region of the full tensor: of its adapter's, or
    where it has none, of every parameter, a tied one once.

    Raises EngineError for a layer whose geometry is not known here.
    """
    parts = adapter_parts(model)
    yield from (piece for part in parts for piece in _adapter(part)) if parts else _parameters(model)


def _adapter(part: AdapterPart) -> Iterator[Piece]:
    """Yields A and B of one layer.  The rows of B are those of the layer's weight, and the columns of A its columns."""
    layer, start, _, full = _outputs(part.path, part.base)[part.index]
    columns, num_columns = part.low.shape[1], int(part.base.input_size)
    first = part.base.tp_rank * columns if isinstance(part.base, RowParallelLinear) else 0
    yield _part(saved_name(layer, "A"), part.low, 1, first, num_columns)
    yield _part(saved_name(layer, "B"), part.high, 0, start, full)


def _parameters(model: nn.Module, memory: Mapping[nn.Parameter, Tensor] | None = None) -> Iterator[Piece]:
    """Yields a view of every parameter, or of the tensor that `memory` has in its place."""
    for path, module in model.named_modules():
        path = path.removesuffix(".base_layer")  # of a layer that may get an adapter
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf == "weight" and _is_tied_head(model, path, parameter):
                continue
            yield from _parts(path, leaf, module, parameter.detach() if memory is None else memory[parameter])


def _is_tied_head(model: nn.Module, path: str, parameter: Tensor) -> bool:
    return path == "lm_head" and parameter is model.get_parameter("model.embed_tokens.weight")


def _parts(path: str, leaf: str, module: nn.Module, parameter: Tensor) -> Iterator[Piece]:
    name = f"{path}.{leaf}"
    if leaf == scales_name("weight"):
        yield from _scales(path, leaf, module, parameter)
    elif isinstance(module, ColumnParallelLinear):
        offset = 0
        for layer, start, size, full in _outputs(path, module):
            yield _part(f"{layer}.{leaf}", parameter[offset : offset + size], 0, start, full)
            offset += size
    elif isinstance(module, RowParallelLinear) and leaf == "weight":
        yield _part(name, parameter, 1, module.tp_rank * parameter.shape[1], parameter.shape[1] * module.tp_size)
    elif isinstance(module, RoutedExperts):
        yield from _experts(path, leaf, module, parameter)
    elif isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        size = shard.org_vocab_end_index - shard.org_vocab_start_index  # what follows is padding
        if size:
            yield _part(name, parameter[:size], 0, shard.org_vocab_start_index, module.org_vocab_size)
    elif isinstance(module, (RMSNorm, RowParallelLinear, ReplicatedLinear, nn.Linear, nn.LayerNorm)):
        yield whole_piece(name, parameter)
    else:
        raise EngineError(f"cannot read back {name}: the layout of {type(module).__name__} is not known to the weight check")


def _scales(path: str, leaf: str, module: Any, parameter: Tensor) -> Iterator[Piece]:
    """Yields the scales of the blocks of this rank's part of each layer, which must be whole blocks."""
    outputs, columns, first, full_columns = _outputs(path, module), parameter.shape[1], 0, parameter.shape[1]
    split = module.tp_size > 1 and isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    if split and isinstance(module, RowParallelLinear):
        _refuse_cut(path, "columns", module.input_size_per_partition)
        first, full_columns = module.tp_rank * columns, module.tp_size * columns
    elif split or len(outputs) > 1:
        for layer, _, size, _ in outputs:
            _refuse_cut(layer, "rows", size)
    expected = (sum(num_blocks(size) for _, _, size, _ in outputs), num_blocks(int(module.weight.shape[1])))
    if tuple(parameter.shape) != expected or parameter.dtype != torch.float32:
        raise EngineError(
            f"cannot read back {path}.{leaf}: {parameter.dtype} {tuple(parameter.shape)}, where blocks of {BLOCK} x {BLOCK} have "
            f"float32 {expected}: vLLM stores these scales in a layout that is not known to the weight check"
        )
    offset = 0
    for layer, start, size, full in outputs:
        count = num_blocks(size)
        region = ((start // BLOCK, start // BLOCK + count), (first, first + columns))
        view, offset = parameter[offset : offset + count], offset + count
        yield Piece(name=f"{layer}.{leaf}", tensor=view, shape=(num_blocks(full), full_columns), region=region)


def _refuse_cut(path: str, what: str, size: int) -> None:
    if size % BLOCK:
        raise EngineError(
            f"a tensor-parallel rank's {size} {what} of {path} are no whole blocks of {BLOCK}, whose scales would belong to two: "
            "set rollout.tensor_model_parallel_size lower, or rollout.quantization=null"
        )


def _experts(path: str, leaf: str, module: RoutedExperts, parameter: Tensor) -> Iterator[Piece]:
    """Yields the projections of this rank's experts.

    parameter: w13_weight (experts, 2 x intermediate, hidden), the gate's rows before those of the up projection, or w2_weight
    (experts, hidden, intermediate).  A rank has some of the experts or a part of each one's intermediate size.
    """
    config, parallel = module.moe_config, module.moe_config.moe_parallel_config
    width, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    padded = parameter.shape[2] if leaf == "w2_weight" else parameter.shape[1] // 2
    if leaf == "w13_weight":
        dim, starts = 0, {module.ckpt_gate_proj_name: 0, module.ckpt_up_proj_name: padded}
    elif leaf == "w2_weight":
        dim, starts = 1, {module.ckpt_down_proj_name: 0}
    else:
        raise EngineError(f"cannot read back {path}.{leaf}: of experts only the weights of their projections are known")
    places = module.expert_map_manager.expert_map
    local = range(len(parameter)) if places is None else places.tolist()
    prefix = path.removesuffix(".routed_experts")
    for expert, place in enumerate(local):
        for projection, start in starts.items() if place >= 0 else ():
            view = parameter[place].narrow(dim, start, width).narrow(1 - dim, 0, hidden)
            yield _part(f"{prefix}.{expert}.{projection}.weight", view, dim, parallel.tp_rank * width, parallel.tp_size * width)


def _part(name: str, view: Tensor, dim: int, start: int, full: int) -> Piece:
    """Returns the piece of a tensor whose dimension `dim` has `full` elements, of which `view` has those from `start` on."""
    shape = (*view.shape[:dim], full, *view.shape[dim + 1 :])
    region = tuple((start, start + size) if axis == dim else (0, size) for axis, size in enumerate(view.shape))
    return Piece(name=name, tensor=view, shape=shape, region=region)


def _outputs(path: str, module: Any) -> list[tuple[str, int, int, int]]:
    """Returns (name, start, size, full size) of this rank's rows of each layer that a module of vLLM's computes, in its order."""
    if isinstance(module, QKVParallelLinear):
        return _qkv(_unfused_prefix(path, "qkv_proj"), module)
    if isinstance(module, MergedColumnParallelLinear):
        prefix, ranks = _unfused_prefix(path, "gate_up_proj"), module.tp_size
        fulls = zip(GATE_UP_PARTS, module.output_sizes, strict=True)
        return [(f"{prefix}{part}", module.tp_rank * (full // ranks), full // ranks, full) for part, full in fulls]
    if isinstance(module, ColumnParallelLinear):
        size = module.output_size_per_partition
        return [(path, module.tp_rank * size, size, size * module.tp_size)]
    return [(path, 0, int(module.output_size), int(module.output_size))]


def _qkv(prefix: str, module: QKVParallelLinear) -> list[tuple[str, int, int, int]]:
    """Heads are assigned to ranks in order; where there are fewer key-value heads than ranks, neighbouring ranks have the same
    one."""
    query = module.num_heads * module.head_size
    key, value = module.num_kv_heads * module.head_size, module.num_kv_heads * module.v_head_size
    kv_rank, kv_ranks = module.tp_rank // module.num_kv_head_replicas, module.tp_size // module.num_kv_head_replicas
    places = ((query, module.tp_rank, module.tp_size), (key, kv_rank, kv_ranks), (value, kv_rank, kv_ranks))
    return [
        (f"{prefix}{part}", rank * size, size, ranks * size) for part, (size, rank, ranks) in zip(QKV_PARTS, places, strict=True)
    ]


def _unfused_prefix(path: str, fused: str) -> str:
    if not path.endswith(fused):
        raise EngineError(f"cannot read back {path}: only layers named {fused} are known to be made of separate weights")
    return path.removesuffix(fused)


if owner_pid() is not None:
    keep_weights_unpacked()
    end_with_owner()
