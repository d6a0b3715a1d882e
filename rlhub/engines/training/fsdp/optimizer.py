"""AdamW on each rank's rows, and the pieces of weights and moments that a bit-exact resume needs.

The optimizer steps plain local tensors that alias the shards: no per-parameter dispatch through distributed tensors, and its
state is already in the form of a checkpoint's, written by any ranks of any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhub.config.sections.training import OptimConfig
from rlhub.engines.training.fsdp.sharding import Layout, ShardedParam
from rlhub.engines.training.host_memory import HOST, HostTensors
from rlhub.engines.training.optimizer import MOMENTS, EngineOptimizer
from rlhub.models.experts import unfused
from rlhub.protocol.weights.pieces import Piece
from rlhub.protocol.weights.regions import whole


@dataclass(slots=True, kw_only=True)
class TrainedShard:
    """A trainable weight and the leaf tensor, this rank's rows of it, that the optimizer steps."""

    owner: ShardedParam
    leaf: nn.Parameter


class ShardedAdamW(EngineOptimizer):
    """AdamW whose norms and biases (fewer than two dimensions) do not decay.  offload: the moments are created in host memory and
    are on the device only while `step` writes them."""

    def __init__(self, params: Sequence[ShardedParam], config: OptimConfig, layout: Layout, *, offload: bool = False) -> None:
        super().__init__(config)
        self.layout = layout
        self.shards = [TrainedShard(owner=p, leaf=nn.Parameter(p.local)) for p in params if p.param.requires_grad]
        decayed = [shard.leaf for shard in self.shards if shard.owner.param.dim() >= 2]
        others = [shard.leaf for shard in self.shards if shard.owner.param.dim() < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )
        for shard in self.shards:
            leaf = shard.leaf
            device = HOST if offload else leaf.device
            self.adamw.state[leaf] = {name: torch.zeros_like(leaf, requires_grad=False, device=device) for name in MOMENTS}
            self.adamw.state[leaf]["step"] = torch.zeros((), dtype=torch.float32, device=leaf.device)
        self._hosted = HostTensors(self.moment(shard, name) for shard in self.shards if offload for name in MOMENTS)

    def moment(self, shard: TrainedShard, name: str) -> Tensor:
        """Returns exp_avg or exp_avg_sq of this rank's rows, live."""
        value: Tensor = self.adamw.state[shard.leaf][name]
        return value

    def rebind(self) -> None:
        """Points the leaves at the shards' memory, which moves when weights are loaded or offloaded."""
        for shard in self.shards:
            shard.leaf.data = shard.owner.local

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        for shard in self.shards:
            self.adamw.state[shard.leaf]["step"].fill_(float(num_steps))

    @torch.no_grad()
    def grad_norm(self) -> float:
        norms = torch._foreach_norm([g for shard in self.shards if (g := shard.owner.local_grad) is not None])
        device = self.shards[0].leaf.device
        total = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        if self.layout.shard_group is not None:
            dist.all_reduce(total, group=self.layout.shard_group)
        return float(total.sqrt())

    @torch.no_grad()
    def apply(self, rate: float, scale: float | None) -> None:
        self.rebind()
        for shard in self.shards:
            shard.leaf.grad = shard.owner.local_grad
        if scale is not None:
            torch._foreach_mul_([shard.leaf.grad for shard in self.shards if shard.leaf.grad is not None], scale)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        with self._hosted.on_device(self.shards[0].leaf.device):
            self.adamw.step()
        for shard in self.shards:
            shard.leaf.grad = None


def live_pieces(params: Iterable[ShardedParam], optimizer: ShardedAdamW | None) -> Iterator[Piece]:
    """Yields this rank's rows of weights and moments, live, each expert under its own name."""
    for param in params:
        yield from _rows(f"model.{param.name}", param.local, param)
    if optimizer is None:
        return
    for shard in optimizer.shards:
        for moment in MOMENTS:
            yield from _rows(f"optim.{moment}.{shard.owner.name}", optimizer.moment(shard, moment), shard.owner)


def _rows(name: str, local: Tensor, param: ShardedParam) -> Iterator[Piece]:
    region = ((param.offset, param.offset + local.shape[0]), *whole(param.global_shape[1:]))
    return unfused(Piece(name=name, tensor=local, shape=param.global_shape, region=region))


@torch.no_grad()
def fill(pieces: Iterable[Piece], read: Callable[[Piece], Tensor]) -> None:
    """Overwrites live tensors with the result of `read` for each; `read` is not called for pieces without rows."""
    for piece in pieces:
        if piece.tensor.numel():
            piece.tensor.copy_(read(piece))
