"""The tensors of an engine that a bit-exact resume needs, as boxes of Hugging Face tensors.

A distributed optimizer owns a flat range of a fused, cut parameter; such a range is a few boxes of a named tensor.
Weights are taken from the optimizer where there is one: its float32 masters are what a resume needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from rlhub.engines.training.megatron.optimizer import ParamRange
from rlhub.engines.training.optimizer import MOMENTS
from rlhub.models.megatron.names import ParamParts
from rlhub.protocol.weights.pieces import Piece
from rlhub.protocol.weights.regions import Region, flat_regions, intersection, moved, relative, sizes, whole


@dataclass(slots=True, kw_only=True)
class LiveRange:
    """Elements [start, stop) of a flattened local parameter that are live in this process.

    weight: those elements as a checkpoint has them.  optimized: the optimizer's view of them, None without an optimizer.
    replica: another rank has the same and writes them.
    """

    parts: ParamParts
    weight: Tensor
    start: int
    stop: int
    optimized: ParamRange | None
    replica: bool


def mark_cut_weights(parts: Iterable[ParamParts]) -> None:
    """Sets Megatron's mark on parameters that tensor-parallel ranks share, which it sets only when it draws the weights itself:
    gradient norms count all others once a model copy.  Call before building an optimizer."""
    for entry in parts:
        one = entry.parts[0] if len(entry.parts) == 1 else None
        replicated = one is not None and one.region == whole(one.shape)
        entry.param.tensor_model_parallel = not replicated  # type: ignore[attr-defined]


def live_ranges(parts: Iterable[ParamParts], ranges: Iterable[ParamRange], *, distributed: bool) -> list[LiveRange]:
    """Returns the live ranges of this rank's parameters: of trained ones those that its optimizer steps, of frozen ones all.
    distributed: data-parallel ranks have ranges of their own."""
    by_param: Mapping[nn.Parameter, ParamRange] = {optimized.param: optimized for optimized in ranges}
    found = []
    for entry in parts:
        optimized, copied = by_param.get(entry.param), _is_model_replica(entry.param)
        if optimized is not None:
            copied |= not distributed and _data_rank(entry.param) > 0
            weight, start, stop = optimized.main, optimized.start, optimized.stop
        elif distributed and entry.param.requires_grad:
            continue  # other data-parallel ranks step all of it
        else:
            copied |= _data_rank(entry.param) > 0
            weight, start, stop = entry.param, 0, entry.param.numel()
        found.append(LiveRange(parts=entry, weight=weight.detach(), start=start, stop=stop, optimized=optimized, replica=copied))
    return found


def _is_model_replica(param: nn.Parameter) -> bool:
    """Returns whether another rank of the same model copy writes this parameter, by megatron's own marks: the second copy of tied
    embeddings, and parameters that tensor-parallel ranks do not cut."""
    cut = getattr(param, "tensor_model_parallel", False)
    return getattr(param, "shared", False) or (not cut and parallel_state.get_tensor_model_parallel_rank() > 0)


def _data_rank(param: nn.Parameter) -> int:
    """Returns the number of this rank's copy of the parameter: context-parallel ranks have copies too; experts are cut over
    data-parallel ranks."""
    if getattr(param, "allreduce", True):
        return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_rank())


def live_pieces(ranges: Iterable[LiveRange]) -> Iterator[Piece]:
    """Yields weights and moments under checkpoint names; live memory."""
    ranges = list(ranges)
    for live in ranges:
        yield from _pieces("model", live.weight, live)
    for live in ranges:
        for moment in MOMENTS if live.optimized is not None else ():
            assert live.optimized is not None
            yield from _pieces(f"optim.{moment}", live.optimized.moment(moment), live)


def _pieces(prefix: str, values: Tensor, live: LiveRange) -> Iterator[Piece]:
    shape = tuple(live.parts.param.shape)
    for box in flat_regions(shape, live.start, live.stop):
        for part in live.parts.parts:
            common = intersection(box, part.local)
            if common is not None:
                yield Piece(
                    name=f"{prefix}.{part.name}",
                    tensor=_view(values, shape, live.start, common),
                    shape=part.shape,
                    region=moved(relative(common, part.local), part.region),
                )


def _view(values: Tensor, shape: tuple[int, ...], start: int, box: Region) -> Tensor:
    """Returns a box of a parameter of this shape, in memory with its flattened elements from `start` on."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    offset = sum(first * stride for (first, _), stride in zip(box, strides, strict=True)) - start
    assert values.is_contiguous(), "a box of flat memory"
    return values.detach().as_strided(sizes(box), strides, values.storage_offset() + offset)


@torch.no_grad()
def fill(ranges: Iterable[LiveRange], read: Callable[[Piece], Tensor]) -> None:
    """Overwrites live memory, copies too, with the result of `read` for each piece."""
    for piece in live_pieces(ranges):
        piece.tensor.copy_(read(piece))
