"""A bit-exact resume's worth of an engine's tensors, to and from a checkpoint written by any ranks of any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from rlhub.engines.training.fsdp.optimizer import MOMENTS, ShardedAdamW
from rlhub.engines.training.fsdp.sharding import ShardedParam
from rlhub.models.experts import unfused
from rlhub.protocol.weights.pieces import Piece
from rlhub.protocol.weights.regions import whole


def live_pieces(params: Iterable[ShardedParam], optimizer: ShardedAdamW | None) -> Iterator[Piece]:
    """This rank's rows of weights and moments, live, each expert under its own name."""
    for param in params:
        yield from _rows(f"model.{param.name}", param.local, param)
    if optimizer is None:
        return
    for slot in optimizer.slots:
        for moment in MOMENTS:
            yield from _rows(f"optim.{moment}.{slot.owner.name}", optimizer.moment(slot, moment), slot.owner)


def _rows(name: str, local: Tensor, param: ShardedParam) -> Iterator[Piece]:
    region = ((param.offset, param.offset + local.shape[0]), *whole(param.global_shape[1:]))
    return unfused(Piece(name=name, tensor=local, shape=param.global_shape, region=region))


@torch.no_grad()
def fill(pieces: Iterable[Piece], read: Callable[[Piece], Tensor]) -> None:
    """Overwrite live tensors with what `read` returns for each; pieces without rows are not asked for."""
    for piece in pieces:
        if piece.tensor.numel():
            piece.tensor.copy_(read(piece))
