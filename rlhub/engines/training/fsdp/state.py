"""A bit-exact resume's worth of an engine's tensors, to and from a checkpoint written by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlhub.checkpoint.shards import TensorShard
from rlhub.engines.training.fsdp.optimizer import MOMENTS, ShardedAdamW
from rlhub.engines.training.fsdp.sharding import ShardedParam


def live_shards(params: list[ShardedParam], optimizer: ShardedAdamW | None) -> Iterator[TensorShard]:
    """This rank's rows of weights and moments; `local` is live memory."""
    for param in params:
        yield _shard(f"model.{param.name}", param.local, param)
    if optimizer is None:
        return
    for slot in optimizer.slots:
        for moment in MOMENTS:
            yield _shard(f"optim.{moment}.{slot.owner.name}", optimizer.moment(slot, moment), slot.owner)


def _shard(name: str, local: Tensor, param: ShardedParam) -> TensorShard:
    return TensorShard(name=name, local=local, global_shape=param.global_shape, offset=param.offset)


@torch.no_grad()
def fill(shards: Iterator[TensorShard], read: Callable[[TensorShard], Tensor]) -> None:
    """Overwrite live tensors with what `read` returns for each; pieces without rows are not asked for."""
    for shard in shards:
        if shard.local.numel():
            shard.local.copy_(read(shard))
