"""The weights of a Megatron engine under Hugging Face names: the stream of full weights, and the live state of a bit-exact
resume.

The stream assembles full weights on every rank, in buckets, out of the pieces of all ranks.  The sender of each box is planned
once, one rank for each element.  Within a bucket each sender's boxes travel together, one sender after the other, so the extra
memory is the bucket and one message, or a tensor that is larger than a bucket.

A distributed optimizer owns a flat range of a fused and cut parameter; such a range (LiveRange) is a few boxes of a named
tensor.  A resume takes the weights from the optimizer if there is one, because it needs the float32 masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from rlhub.engines.training.megatron.optimizer import ParamRange
from rlhub.engines.training.optimizer import MOMENTS
from rlhub.errors import EngineError
from rlhub.models.lora import ADAPTER, PEFT_MODEL
from rlhub.models.megatron.build import ParamParts
from rlhub.models.megatron.lora import LowRank
from rlhub.protocol.weights.pieces import (
    Piece,
    PieceInfo,
    Region,
    flat_regions,
    intersection,
    moved,
    num_elements,
    relative,
    remainder,
    sizes,
    take,
    whole,
)

LORA_MARK = ".lora_"
"""The part that marks adapters in the names of weights."""
MESSAGE_BYTES = 8 << 20
"""The size of the messages for boxes that are not contiguous, of a tensor larger than a bucket."""


class MegatronWeightStream:
    """Streams the full weights once; TrainEngine.named_weights says what callers may rely on."""

    def __init__(
        self,
        tensors: Sequence[StreamedTensor],
        pieces: Sequence[Piece],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        device: torch.device,
        values: Callable[[Piece], Tensor] = lambda piece: piece.tensor,
    ) -> None:
        """values: returns the values that are sent of a part of a piece, such as those with an adapter merged in."""
        self._values = values
        self.buckets, self.bucket_bytes = plan_buckets(tensors, bucket_bytes), bucket_bytes
        self.group, self.rank, self.device = group, group.rank(), device
        self.pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self.pieces.setdefault(piece.name, []).append(piece)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        for bucket in self.buckets:
            yield self._gathered(bucket)

    @torch.no_grad()
    def _gathered(self, bucket: list[StreamedTensor]) -> list[tuple[str, Tensor]]:
        sent = [tensor for tensor in bucket if tensor.sources]
        large = sum(tensor.num_bytes for tensor in sent) > self.bucket_bytes
        if large:  # a large tensor takes the place of the buffers
            self._buffers.clear()
        out = self._allocated(sent, large)
        for rank in sorted({source.rank for tensor in sent for source in tensor.sources}):
            boxes = [(tensor, source.region) for tensor in sent for source in tensor.sources if source.rank == rank]
            if large:
                self._send_large(rank, boxes, out)
            else:
                self._send(rank, boxes, out)
        return [(t.name, out[t.name] if t.sources else self._values(self.pieces[t.name][0])) for t in bucket]

    def _allocated(self, tensors: list[StreamedTensor], large: bool) -> dict[str, Tensor]:
        """Returns full tensors in one buffer, which the next bucket reuses; a large tensor gets memory of its own."""
        if large:
            return {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for tensor in tensors}
        out, first = {}, 0
        for tensor in tensors:
            count = math.prod(tensor.shape)
            out[tensor.name] = self._buffer("bucket", tensor.dtype)[first : first + count].view(tensor.shape)
            first += count
        return out

    def _buffer(self, use: str, dtype: torch.dtype) -> Tensor:
        key = (use, dtype)
        if key not in self._buffers:
            fitting = [sum(t.num_bytes for t in bucket if t.sources) for bucket in self.buckets if bucket[0].dtype == dtype]
            size = max((num_bytes for num_bytes in fitting if num_bytes <= self.bucket_bytes), default=0)
            self._buffers[key] = torch.empty(size // dtype.itemsize, dtype=dtype, device=self.device)
        return self._buffers[key]

    def _send(self, rank: int, boxes: list[tuple[StreamedTensor, Region]], out: dict[str, Tensor]) -> None:
        """Sends one rank's boxes of a bucket in one message."""
        total = sum(num_elements(region) for _, region in boxes)
        message = self._buffer("message", boxes[0][0].dtype)[:total]
        places, first = [], 0
        for tensor, region in boxes:
            places.append((tensor, region, message[first : first + num_elements(region)].view(sizes(region))))
            first += num_elements(region)
        if rank == self.rank:
            for tensor, region, place in places:
                place.copy_(self._own(tensor.name, region))
        dist.broadcast(message, group=self.group, group_src=rank)
        for tensor, region, place in places:
            take(out[tensor.name], region).copy_(place)

    def _send_large(self, rank: int, boxes: list[tuple[StreamedTensor, Region]], out: dict[str, Tensor]) -> None:
        """Sends one rank's boxes into place if that is contiguous memory, else a few rows at a time."""
        for tensor, region in boxes:
            target = take(out[tensor.name], region)
            own = self._own(tensor.name, region) if rank == self.rank else None
            contiguous = target.is_contiguous()
            row_bytes = target.numel() * target.element_size() // target.shape[0]
            step = target.shape[0] if contiguous else max(MESSAGE_BYTES // row_bytes, 1)
            for first in range(0, target.shape[0], step):
                place = target[first : first + step]
                message = place if contiguous else place.new_empty(place.shape)
                if own is not None:
                    message.copy_(own[first : first + step])
                dist.broadcast(message, group=self.group, group_src=rank)
                if not contiguous:
                    place.copy_(message)

    def _own(self, name: str, region: Region) -> Tensor:
        """Returns a box that this rank sends, taken from the piece that contains it."""
        piece = next(piece for piece in self.pieces[name] if intersection(piece.region, region) == region)
        return self._values(replace(piece, tensor=take(piece.tensor, relative(region, piece.region)), region=region))


@dataclass(slots=True, kw_only=True)
class StreamedTensor:
    """A full tensor of the stream.  sources: the boxes that make up the tensor, each element once; empty if every rank has all
    of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: list[BoxSource] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class BoxSource:
    """A box of a tensor, and the rank within the group that sends it."""

    rank: int
    region: Region


def plan_stream(infos_by_rank: Sequence[Sequence[PieceInfo]]) -> list[StreamedTensor]:
    """Plans the sender of every box from the pieces of each rank of the group; the plan is the same on every rank.

    Raises EngineError if no rank has some part of a tensor.
    """
    by_name: dict[str, list[tuple[int, PieceInfo]]] = {}
    for rank, infos in enumerate(infos_by_rank):
        for info in infos:
            by_name.setdefault(info.name, []).append((rank, info))
    return [_plan_tensor(name, owners, len(infos_by_rank)) for name, owners in by_name.items()]


def _plan_tensor(name: str, owners: list[tuple[int, PieceInfo]], ranks: int) -> StreamedTensor:
    first = owners[0][1]
    planned = StreamedTensor(name=name, shape=first.shape, dtype=first.dtype)
    if {rank for rank, info in owners if info.region == whole(info.shape)} == set(range(ranks)):
        return planned
    missing = [whole(first.shape)]
    for rank, info in owners:
        left = []
        for region in missing:
            common = intersection(region, info.region)
            if common is None:
                left.append(region)
            else:
                planned.sources.append(BoxSource(rank=rank, region=common))
                left += remainder(region, common)
        missing = left
    if missing:
        raise EngineError(f"{name}: no rank holds {missing[0]} of {first.shape}; the training engine's layout has a hole")
    return planned


def plan_buckets(tensors: Sequence[StreamedTensor], bucket_bytes: int) -> list[list[StreamedTensor]]:
    """Returns buckets of neighbouring tensors of one dtype of up to `bucket_bytes`; a larger tensor is a bucket of its own."""
    buckets: list[list[StreamedTensor]] = []
    filled = 0
    for tensor in tensors:
        if not buckets or filled + tensor.num_bytes > bucket_bytes or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.num_bytes
    return buckets


def adapter_pieces(pieces: Iterable[Piece], scaling: float) -> Iterator[Piece]:
    """Yields the adapters' of these pieces under their names in peft's files, B multiplied by `scaling`."""
    for piece in pieces:
        if LORA_MARK in piece.name:
            factor = scaling if ".lora_B." in piece.name else 1.0
            tensor = piece.tensor if factor == 1.0 else piece.tensor * factor
            yield replace(piece, name=PEFT_MODEL + piece.name.replace(f".{ADAPTER}.weight", ".weight"), tensor=tensor)


def merged(piece: Piece, part: LowRank, scaling: float) -> Tensor:
    """Returns the values of a piece of a frozen weight with its adapter, of which this rank has what the piece needs."""
    (first, last), (left, right) = piece.region
    low = part.lora_A.detach()[:, left - part.first_column : right - part.first_column]
    high = part.lora_B.detach()[first - part.first_row : last - part.first_row]
    return torch.addmm(piece.tensor, high, low, alpha=scaling)


@dataclass(slots=True, kw_only=True)
class LiveRange:
    """Elements [start, stop) of a flattened local parameter that are live in this process.

    weight: these elements as a checkpoint stores them.
    optimized: the optimizer's view of them; None without an optimizer.
    replica: True if another rank has the same elements and writes them.
    """

    parts: ParamParts
    weight: Tensor
    start: int
    stop: int
    optimized: ParamRange | None
    replica: bool


def live_ranges(parts: Iterable[ParamParts], ranges: Iterable[ParamRange], *, distributed: bool) -> list[LiveRange]:
    """Returns the live ranges of this rank's parameters: for trained parameters those that its optimizer steps, for frozen
    ones all elements.

    distributed: True if each data-parallel rank has ranges of its own.
    """
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


def live_pieces(ranges: Iterable[LiveRange]) -> Iterator[Piece]:
    """Yields weights and then moments under checkpoint names, as live memory."""
    ranges = list(ranges)
    for live in ranges:
        yield from _pieces("model", live.weight, live)
    for live in ranges:
        for moment in MOMENTS if live.optimized is not None else ():
            assert live.optimized is not None
            yield from _pieces(f"optim.{moment}", live.optimized.moment(moment), live)


@torch.no_grad()
def fill(ranges: Iterable[LiveRange], read: Callable[[Piece], Tensor]) -> None:
    """Overwrites the live memory of each piece, copies included, with the result of `read`."""
    for piece in live_pieces(ranges):
        piece.tensor.copy_(read(piece))


def mark_cut_weights(parts: Iterable[ParamParts]) -> None:
    """Marks the parameters that tensor-parallel ranks cut, as Megatron does only when it draws the weights itself.

    Gradient norms count all other parameters once per model copy.  Call before building an optimizer.
    """
    for entry in parts:
        one = entry.parts[0] if len(entry.parts) == 1 else None
        replicated = one is not None and one.region == whole(one.shape)
        entry.param.tensor_model_parallel = not replicated  # type: ignore[attr-defined]


def _is_model_replica(param: nn.Parameter) -> bool:
    """Returns whether another rank of the same model copy writes this parameter, by megatron's own marks: the second copy of
    tied embeddings, and parameters that tensor-parallel ranks do not cut."""
    cut = getattr(param, "tensor_model_parallel", False)
    return getattr(param, "shared", False) or (not cut and parallel_state.get_tensor_model_parallel_rank() > 0)


def _data_rank(param: nn.Parameter) -> int:
    """Returns the number of this rank's copy of the parameter.  Context-parallel ranks have copies too; experts are cut over
    data-parallel ranks."""
    if getattr(param, "allreduce", True):
        return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_rank())


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
    """Returns a box of a parameter of this shape, in memory that begins with its flattened element `start`."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    offset = sum(first * stride for (first, _), stride in zip(box, strides, strict=True)) - start
    assert values.is_contiguous(), "a box of flat memory"
    return values.detach().as_strided(sizes(box), strides, values.storage_offset() + offset)
