"""A model's weights over the ranks: their layout, and the stream that gathers them again.

    Layout, shard_model      this rank's place in the mesh, and the sharding of a model by it
    ShardedParam             one weight with its rows on this rank, which optimizer, stream and checkpoint share
    FSDPWeightStream         full weights under Hugging Face names, in buckets

The shards of a bucket are gathered together.  Buffers are reused from bucket to bucket, so the extra memory is about two
buckets (the gathered shards and the tensors assembled from them), or one tensor that is larger than a bucket.  One rank on a
CPU has plain tensors, because FSDP's gathers and copies would only cost time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlhub.config.sections.training import FSDPConfig
from rlhub.errors import ConfigError
from rlhub.models.experts import unfused, unfused_tensors
from rlhub.models.hf import transformer_layers
from rlhub.models.lora import named_parameters
from rlhub.protocol.weights.pieces import Piece, whole

ALL_GATHER = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
"""Gathers one tensor of each rank into one; torch 2.11 knows it by its former name."""
WHOLE_MODEL_BYTES = 64 << 20
"""Models up to this size are gathered at once, because many small collectives cost more than they save."""


class FSDPWeightStream:
    """Streams the full weights once; TrainEngine.named_weights says what callers may rely on."""

    def __init__(self, entries: Sequence[Entry], layout: Layout, bucket_bytes: int) -> None:
        self.layout = layout
        self.buckets = plan_buckets(entries, bucket_bytes)
        shared = [bucket for bucket in self.buckets if bucket.num_bytes <= bucket_bytes or len(_parts(bucket)) > 1]
        self._largest = max(map(self._num_elements, shared), default=0)
        self._gathered: Tensor | None = None
        self._assembled: Tensor | None = None

    def _num_elements(self, bucket: Bucket) -> int:
        """Returns the number of elements of a bucket in which every rank's part is padded to a full chunk."""
        return self.layout.shard_size * sum(part.chunk * _row_size(part) for part in _parts(bucket))

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        for bucket in self.buckets:
            yield self._named(bucket)

    @torch.no_grad()
    def _named(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        parts = _parts(bucket)
        full = {id(part): tensor for part, tensor in zip(parts, self._full(parts), strict=True)}
        return list(unfused_tensors((entry.name, self._merged(entry, full)) for entry in bucket.entries))

    def _merged(self, entry: Entry, full: dict[int, Tensor]) -> Tensor:
        weight = full[id(entry.weight)]
        if entry.lora_a is None or entry.lora_b is None:
            return weight if entry.scaling == 1.0 else weight * entry.scaling
        low, high = full[id(entry.lora_a)], full[id(entry.lora_b)]
        return torch.addmm(weight, high, low, alpha=entry.scaling)

    def _full(self, parts: list[ShardedParam]) -> list[Tensor]:
        """Returns the whole tensors, which are live views if this rank has everything."""
        if self.layout.shard_size == 1:
            return [part.local for part in parts]
        if len(parts) == 1:
            return [self._gather_one(parts[0])]
        return self._gather_many(parts)

    def _gather_one(self, part: ShardedParam) -> Tensor:
        """Gathers one weight into place, without a copy after the all-gather.

        A weight larger than a bucket gets memory of its own, for which the buffers are freed.
        """
        size = self.layout.shard_size * part.chunk * _row_size(part)
        if size <= self._largest:
            self._assembled = self._buffer(self._assembled, part.local)
            out = self._assembled[:size]
        else:
            self._gathered = self._assembled = None
            out = part.local.new_empty(size)
        self._gather(out.view(self.layout.shard_size, -1), [part])
        return out[: part.param.numel()].view(part.global_shape)

    def _gather(self, out: Tensor, parts: list[ShardedParam]) -> None:
        """Fills row r of `out` (ranks, elements) with rank r's rows of the parts, one after the other, each padded to a full
        chunk.

        It gathers in place, because a send buffer would need memory too.  gloo's own all-gather makes a second copy of
        everything, so on CPU each rank broadcasts its row.
        """
        group, first = self.layout.shard_group, 0
        own = out[self.layout.shard_rank]
        for part in parts:
            own[first : first + part.local.numel()] = part.local.flatten()
            first += part.chunk * _row_size(part)
        if out.device.type != "cpu":
            ALL_GATHER(out.view(-1), own, group=group)
            return
        works = [dist.broadcast(row, group=group, group_src=rank, async_op=True) for rank, row in enumerate(out)]
        for work in works:
            assert work is not None
            work.wait()

    def _buffer(self, buffer: Tensor | None, like: Tensor) -> Tensor:
        """Returns one allocation of the largest bucket's size, which all buckets of a dtype share."""
        return buffer if buffer is not None and buffer.dtype == like.dtype else like.new_empty(self._largest)

    def _gather_many(self, parts: list[ShardedParam]) -> list[Tensor]:
        ranks = self.layout.shard_size
        sizes = [part.chunk * _row_size(part) for part in parts]
        self._gathered = self._buffer(self._gathered, parts[0].local)
        gathered = self._gathered[: ranks * sum(sizes)].view(ranks, -1)
        self._gather(gathered, parts)
        self._assembled = self._buffer(self._assembled, parts[0].local)
        tensors, first, place = [], 0, 0
        for part, size in zip(parts, sizes, strict=True):
            assembled = self._assembled[place : place + ranks * size]
            assembled.view(ranks, size).copy_(gathered[:, first : first + size])
            tensors.append(assembled[: part.param.numel()].view(part.global_shape))
            first, place = first + size, place + ranks * size
        return tensors


@dataclass(slots=True, kw_only=True)
class Entry:
    """One weight of the stream under its name there: W x scaling, or W + scaling x B A with the adapter to merge into it."""

    name: str
    weight: ShardedParam
    lora_a: ShardedParam | None = None
    lora_b: ShardedParam | None = None
    scaling: float = 1.0

    @property
    def parts(self) -> list[ShardedParam]:
        return [part for part in (self.weight, self.lora_a, self.lora_b) if part is not None]

    @property
    def num_bytes(self) -> int:
        return sum(part.param.numel() * part.param.element_size() for part in self.parts)


@dataclass(slots=True, kw_only=True)
class Bucket:
    """The weights that are gathered together."""

    entries: list[Entry] = field(default_factory=list)
    num_bytes: int = 0


def plan_buckets(entries: Sequence[Entry], bucket_bytes: int) -> list[Bucket]:
    """Returns buckets of neighbouring weights of one dtype of up to `bucket_bytes`; a larger weight is a bucket of its own."""
    buckets: list[Bucket] = []
    for entry in entries:
        last = buckets[-1] if buckets else None
        dtype = entry.weight.param.dtype
        if last is None or last.num_bytes + entry.num_bytes > bucket_bytes or last.entries[0].weight.param.dtype != dtype:
            last = Bucket()
            buckets.append(last)
        last.entries.append(entry)
        last.num_bytes += entry.num_bytes
    return buckets


def _parts(bucket: Bucket) -> list[ShardedParam]:
    return [part for entry in bucket.entries for part in entry.parts]


def _row_size(part: ShardedParam) -> int:
    return part.param.numel() // max(part.global_shape[0], 1)


@dataclass(slots=True, kw_only=True)
class Layout:
    """This rank's place in the mesh.

    mesh: None for one rank on a CPU, which has plain tensors.
    shard_group: the ranks that together have one copy of the model; None if each rank has a copy.
    replica: the number of this rank's copy of the model.
    """

    mesh: DeviceMesh | None
    shard_group: dist.ProcessGroup | None
    shard_rank: int
    shard_size: int
    replica: int


def make_layout(fsdp: FSDPConfig, device: torch.device) -> Layout:
    """Returns the layout for this process group.  Raises ConfigError if fsdp_size does not divide the number of ranks."""
    world = dist.get_world_size()
    if world == 1 and device.type == "cpu":
        return Layout(mesh=None, shard_group=None, shard_rank=0, shard_size=1, replica=0)
    size = world if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    if size < 1 or world % size:
        raise ConfigError(f"fsdp_config.fsdp_size: {size} does not divide the {world} ranks; use -1 for all of them")
    if size == world:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        shard = mesh
    else:
        mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replica", "shard"))
        shard = mesh["shard"]
    return Layout(
        mesh=mesh,
        shard_group=shard.get_group(),
        shard_rank=shard.get_local_rank(),
        shard_size=size,
        replica=dist.get_rank() // size,
    )


def shard_model(root: nn.Module, model: PreTrainedModel, layout: Layout, compute_dtype: torch.dtype | None) -> None:
    """Shards the model in place.

    compute_dtype: the dtype of gathered weights and activations, with gradients reduced in float32; None computes in the
    stored dtype.
    """
    if layout.mesh is None:
        return
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if num_bytes(model.parameters()) > WHOLE_MODEL_BYTES:
        for layer in transformer_layers(model):
            fully_shard(layer, mesh=layout.mesh, mp_policy=policy)
    fully_shard(root, mesh=layout.mesh, mp_policy=policy)


@dataclass(slots=True, kw_only=True)
class ShardedParam:
    """A weight: its Hugging Face name, the live parameter, and its rows on this rank.

    Rows are dealt out in equal chunks, of which the last may be shorter or empty: rank r has rows [r * chunk, (r + 1) *
    chunk).
    """

    name: str
    param: nn.Parameter
    layout: Layout

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(self.param.shape)

    @property
    def chunk(self) -> int:
        """Returns the number of rows of a full chunk."""
        return -(-self.param.shape[0] // self.layout.shard_size)

    @property
    def offset(self) -> int:
        return min(self.layout.shard_rank * self.chunk, self.param.shape[0])

    @property
    def local(self) -> Tensor:
        """Returns this rank's rows, live."""
        return _local(self.param)

    @property
    def local_grad(self) -> Tensor | None:
        """Returns the gradient of this rank's rows after the backward pass, live; None without one."""
        return None if self.param.grad is None else _local(self.param.grad)


def sharded_params(model: PreTrainedModel, layout: Layout) -> list[ShardedParam]:
    """Returns all weights in the model's order; a tied weight once.  Call while the parameters are shards, not while they are
    gathered."""
    return [ShardedParam(name=name, param=param, layout=layout) for name, param in named_parameters(model)]


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_pieces(params: Iterable[ShardedParam]) -> Iterator[Piece]:
    """Yields this rank's rows, live, under checkpoint names."""
    for param in params:
        rows = (param.offset, param.offset + param.local.shape[0])
        if rows[0] < rows[1]:
            region = (rows, *whole(param.global_shape[1:]))
            yield from unfused(Piece(name=param.name, tensor=param.local, shape=param.global_shape, region=region))


def adapter_pieces(entries: Iterable[Entry]) -> Iterator[Piece]:
    """Yields this rank's rows of weights that no adapter is merged into, under their names in the stream; copies where they are
    scaled."""
    for entry in entries:
        for piece in local_pieces([replace(entry.weight, name=entry.name)]):
            yield piece if entry.scaling == 1.0 else replace(piece, tensor=piece.tensor * entry.scaling)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Counts the bytes of the tensors; those of distributed tensors over all ranks."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def reshard(root: nn.Module) -> None:
    """Frees gathered weights after a pass without backward, so that parameters are the shards again."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
