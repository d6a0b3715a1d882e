"""A bit-exact resume's worth of an engine's tensors, as boxes of Hugging Face tensors.

A distributed optimizer owns a flat range of a fused, cut parameter; what such a range is of a named tensor are a few boxes.
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

from rlhub.engines.training.megatron.optimizer import MOMENTS, Slot
from rlhub.models.megatron.names import ParamParts
from rlhub.protocol.weights.pieces import Piece
from rlhub.protocol.weights.regions import Region, flat_regions, intersection, moved, relative, sizes, whole


@dataclass(slots=True, kw_only=True)
class Holding:
    """Elements [start, stop) of a flattened local parameter that are live in this process.

    weight: those elements as a checkpoint has them.  slot: their optimizer state, None without an optimizer.  replica: another
    rank has the same and writes them.
    """

    parts: ParamParts
    weight: Tensor
    start: int
    stop: int
    slot: Slot | None
    replica: bool


def mark_cut_weights(parts: Iterable[ParamParts]) -> None:
    """Megatron's mark on parameters that tensor-parallel ranks share, which it makes only when it draws the weights itself:
    gradient norms count all others once a model copy.  Call before building an optimizer."""
    for entry in parts:
        one = entry.parts[0] if len(entry.parts) == 1 else None
        replicated = one is not None and one.region == whole(one.shape)
        entry.param.tensor_model_parallel = not replicated  # type: ignore[attr-defined]


def holdings(parts: Iterable[ParamParts], slots: Iterable[Slot], *, distributed: bool) -> list[Holding]:
    """What this rank holds of its parameters, trained ones in the ranges its optimizer steps.  distributed: data-parallel ranks
    have ranges of their own.  Frozen parameters are whole."""
    by_param: Mapping[nn.Parameter, Slot] = {slot.param: slot for slot in slots}
    found = []
    for entry in parts:
        slot, copied = by_param.get(entry.param), _is_model_replica(entry.param)
        if slot is not None:
            copied |= not distributed and _data_rank(entry.param) > 0
            weight, start, stop = slot.main, slot.start, slot.stop
        elif distributed and entry.param.requires_grad:
            continue  # other data-parallel ranks step all of it
        else:
            copied |= _data_rank(entry.param) > 0
            weight, start, stop = entry.param, 0, entry.param.numel()
        found.append(Holding(parts=entry, weight=weight.detach(), start=start, stop=stop, slot=slot, replica=copied))
    return found


def _is_model_replica(param: nn.Parameter) -> bool:
    """Whether another rank of the same model copy stands for this parameter, by megatron's own marks: the second copy of tied
    embeddings, and what tensor-parallel ranks do not cut."""
    cut = getattr(param, "tensor_model_parallel", False)
    return getattr(param, "shared", False) or (not cut and parallel_state.get_tensor_model_parallel_rank() > 0)


def _data_rank(param: nn.Parameter) -> int:
    """Which copy of the parameter this rank has: context-parallel ranks have copies, too; experts are cut over data-parallel
    ranks."""
    if getattr(param, "allreduce", True):
        return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_rank())


def live_pieces(held: Iterable[Holding]) -> Iterator[Piece]:
    """Weights and moments under checkpoint names; live memory."""
    held = list(held)
    for holding in held:
        yield from _pieces("model", holding.weight, holding)
    for holding in held:
        for moment in MOMENTS if holding.slot is not None else ():
            assert holding.slot is not None
            yield from _pieces(f"optim.{moment}", holding.slot.moment(moment), holding)


def _pieces(prefix: str, values: Tensor, holding: Holding) -> Iterator[Piece]:
    shape = tuple(holding.parts.param.shape)
    for box in flat_regions(shape, holding.start, holding.stop):
        for part in holding.parts.parts:
            common = intersection(box, part.local)
            if common is not None:
                yield Piece(
                    name=f"{prefix}.{part.name}",
                    tensor=_view(values, shape, holding.start, common),
                    shape=part.shape,
                    region=moved(relative(common, part.local), part.region),
                )


def _view(values: Tensor, shape: tuple[int, ...], start: int, box: Region) -> Tensor:
    """A box of a parameter of this shape, in memory that holds its flattened elements from `start` on."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    offset = sum(first * stride for (first, _), stride in zip(box, strides, strict=True)) - start
    assert values.is_contiguous(), "a box of flat memory"
    return values.detach().as_strided(sizes(box), strides, values.storage_offset() + offset)


@torch.no_grad()
def fill(held: Iterable[Holding], read: Callable[[Piece], Tensor]) -> None:
    """Overwrite live memory, copies too, with what `read` returns for each piece."""
    for piece in live_pieces(held):
        piece.tensor.copy_(read(piece))
