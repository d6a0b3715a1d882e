"""The smallest TrainEngine: a plain replicated model whose weights can be streamed or read in place.  It cannot train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist

from rlhub.engines.training.base import LossFunction, Rows, StepReport, TrainEngine
from rlhub.engines.training.collectives import gather_rows
from rlhub.models.experts import unfused, unfused_tensors
from rlhub.protocol.weights.pieces import Piece, whole_piece

OPERATIONS = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class PlainTrainEngine(TrainEngine):
    """`log` records the order of onload, stream and offload."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.dp_rank = dist.get_rank() if dist.is_initialized() else 0
        self.dp_size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = torch.device("cpu")
        self.is_collect = True
        self.log: list[str] = []

    def named_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        self.log.append("stream")
        bucket: list[tuple[str, Tensor]] = []
        for name, parameter in unfused_tensors(self.model.named_parameters()):
            bucket.append((name, parameter.detach()))
            if sum(tensor.nbytes for _, tensor in bucket) >= bucket_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def local_weights(self) -> Iterator[Piece] | None:
        self.log.append("local")
        whole = (whole_piece(name, parameter.detach()) for name, parameter in self.model.named_parameters())
        return (piece for fused in whole for piece in unfused(fused))

    def reduce(self, values: Tensor, op: str = "sum", *, every_rank: bool = False) -> Tensor:
        out = values.clone()
        if dist.is_initialized():
            dist.all_reduce(out, op=OPERATIONS[op])
        return out

    def gather(self, rows: Tensor) -> Tensor:
        return gather_rows(rows, self.device) if dist.is_initialized() else rows

    def onload(self) -> None:
        self.log.append("onload")

    def offload(self) -> None:
        self.log.append("offload")

    def perturb(self, seed: int) -> None:
        """Change every weight a little, as a training step would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def initialize(self) -> None:
        raise NotImplementedError

    def forward_backward(self, rows: Rows, loss_fn: LossFunction, *, outputs: Iterable[str] = ()) -> dict[str, float]:
        raise NotImplementedError

    def optimizer_step(self) -> StepReport:
        raise NotImplementedError

    def infer(self, rows: Rows, *, outputs: Iterable[str], adapters: bool = True) -> dict[str, Tensor]:
        raise NotImplementedError

    def state_shards(self) -> Iterator[Piece]:
        raise NotImplementedError

    def load_state(self, read: Callable[[Piece], Tensor]) -> None:
        raise NotImplementedError

    def scalar_state(self) -> dict[str, int | float]:
        raise NotImplementedError

    def load_scalar_state(self, state: Mapping[str, int | float]) -> None:
        raise NotImplementedError
