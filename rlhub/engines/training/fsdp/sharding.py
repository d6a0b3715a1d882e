"""The layout of a model over the ranks, and the view of it that optimizer, weight stream and checkpoint share.

One rank on a CPU has plain tensors: FSDP's gathers and copies would only cost time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlhub.config.sections.training import FSDPConfig
from rlhub.errors import ConfigError
from rlhub.models.experts import unfused
from rlhub.models.hf import transformer_layers
from rlhub.models.lora import named_parameters
from rlhub.protocol.weights.pieces import Piece
from rlhub.protocol.weights.regions import whole

WHOLE_MODEL_BYTES = 64 << 20
"""Models up to this size are gathered at once: many small collectives cost more than they save."""


@dataclass(slots=True, kw_only=True)
class Layout:
    """This rank's place in the mesh.  shard_group: the ranks that together have one copy of the model; None: a copy each."""

    mesh: DeviceMesh | None
    shard_group: dist.ProcessGroup | None
    shard_rank: int
    shard_size: int
    replica: int


@dataclass(slots=True, kw_only=True)
class ShardedParam:
    """A weight: its Hugging Face name, the live parameter, and its rows on this rank.

    Rows are dealt in equal chunks, the last ones shorter or empty: rank r has rows [r * chunk, (r + 1) * chunk).
    """

    name: str
    param: nn.Parameter
    layout: Layout

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(self.param.shape)

    @property
    def chunk(self) -> int:
        """The number of rows of a full chunk."""
        return -(-self.param.shape[0] // self.layout.shard_size)

    @property
    def offset(self) -> int:
        return min(self.layout.shard_rank * self.chunk, self.param.shape[0])

    @property
    def local(self) -> Tensor:
        """This rank's rows, live."""
        return _local(self.param)

    @property
    def local_grad(self) -> Tensor | None:
        """The gradient of this rank's rows after the backward pass, live."""
        return None if self.param.grad is None else _local(self.param.grad)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Counts the bytes of the tensors; of distributed ones, over all ranks."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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
    """Shards in place.  compute_dtype: of gathered weights and activations (gradients are reduced in float32); None: stored."""
    if layout.mesh is None:
        return
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if num_bytes(model.parameters()) > WHOLE_MODEL_BYTES:
        for layer in transformer_layers(model):
            fully_shard(layer, mesh=layout.mesh, mp_policy=policy)
    fully_shard(root, mesh=layout.mesh, mp_policy=policy)


def sharded_params(model: PreTrainedModel, layout: Layout) -> list[ShardedParam]:
    """Returns all weights in the model's order; a tied weight once.  Call while the model is sharded, not between gathers."""
    return [ShardedParam(name=name, param=param, layout=layout) for name, param in named_parameters(model)]


def local_pieces(params: Iterable[ShardedParam]) -> Iterator[Piece]:
    """Yields this rank's rows, live, under checkpoint names."""
    for param in params:
        rows = (param.offset, param.offset + param.local.shape[0])
        if rows[0] < rows[1]:
            region = (rows, *whole(param.global_shape[1:]))
            yield from unfused(Piece(name=param.name, tensor=param.local, shape=param.global_shape, region=region))


def reshard(root: nn.Module) -> None:
    """Frees gathered weights, so that parameters are the shards again (after a pass without backward)."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
