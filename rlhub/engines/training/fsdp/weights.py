"""Streaming full weights out of the shards, in buckets, under Hugging Face names.

The shards of a bucket travel in one all-gather.  Buffers are reused from bucket to bucket, so the extra memory is about two
buckets (what was gathered and the tensors made of it), or one tensor where that is larger than a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.engines.training.fsdp.sharding import Layout, ShardedParam
from rlhub.models.lora import LoRALinear


@dataclass(slots=True, kw_only=True)
class Entry:
    """A weight of the stream, with the adapter to merge into it, if it has one."""

    weight: ShardedParam
    lora: LoRALinear | None = None
    lora_a: ShardedParam | None = None
    lora_b: ShardedParam | None = None

    @property
    def parts(self) -> list[ShardedParam]:
        return [part for part in (self.weight, self.lora_a, self.lora_b) if part is not None]

    @property
    def num_bytes(self) -> int:
        return sum(part.param.numel() * part.param.element_size() for part in self.parts)


@dataclass(slots=True, kw_only=True)
class Bucket:
    entries: list[Entry] = field(default_factory=list)
    num_bytes: int = 0


def plan_buckets(entries: Sequence[Entry], bucket_bytes: int) -> list[Bucket]:
    """Neighbouring weights of one dtype up to `bucket_bytes`; a larger weight is a bucket of its own."""
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


class WeightStream:
    """One pass over the weights; see `TrainEngine.named_weights` for what callers may rely on."""

    def __init__(self, entries: Sequence[Entry], layout: Layout, bucket_bytes: int) -> None:
        self.layout = layout
        # While it is being gathered a bucket also exists as what this rank sends: 1 / shard_size of it.
        ranks = layout.shard_size
        self.buckets = plan_buckets(entries, bucket_bytes * 2 * ranks // (2 * ranks + 1))
        self._gathered: Tensor | None = None
        self._assembled: Tensor | None = None

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        with torch.no_grad():
            for bucket in self.buckets:
                parts = [part for entry in bucket.entries for part in entry.parts]
                full = {id(part): tensor for part, tensor in zip(parts, self._full(parts), strict=True)}
                named = [(entry.weight.name, self._merged(entry, full)) for entry in bucket.entries]
                del full
                yield named
                del named

    def _merged(self, entry: Entry, full: dict[int, Tensor]) -> Tensor:
        weight = full[id(entry.weight)]
        if entry.lora is None or entry.lora_a is None or entry.lora_b is None:
            return weight
        low, high = full[id(entry.lora_a)], full[id(entry.lora_b)]
        return torch.addmm(weight, high, low, alpha=entry.lora.scaling)

    def _full(self, parts: list[ShardedParam]) -> list[Tensor]:
        """The whole tensors; live views where this rank has everything."""
        if self.layout.shard_size == 1:
            return [part.local for part in parts]
        if len(parts) == 1:
            return [self._gather_one(parts[0])]
        return self._gather_many(parts)

    def _gather_one(self, part: ShardedParam) -> Tensor:
        """Straight into place: no copy after the all-gather."""
        self._gathered = self._assembled = None
        row = part.global_shape[1:]
        out = torch.empty((self.layout.shard_size * part.chunk, *row), dtype=part.param.dtype, device=part.local.device)
        dist.all_gather_into_tensor(out, _padded(part), group=self.layout.shard_group)
        return out[: part.global_shape[0]]

    def _gather_many(self, parts: list[ShardedParam]) -> list[Tensor]:
        ranks = self.layout.shard_size
        sizes = [part.chunk * _row_size(part) for part in parts]
        self._gathered = _fitting(self._gathered, ranks * sum(sizes), parts[0].local)
        gathered = self._gathered[: ranks * sum(sizes)].view(ranks, -1)
        send = torch.cat([_padded(part).flatten() for part in parts])
        dist.all_gather_into_tensor(gathered.view(-1), send, group=self.layout.shard_group)
        del send
        self._assembled = _fitting(self._assembled, ranks * sum(sizes), parts[0].local)
        tensors, first, place = [], 0, 0
        for part, size in zip(parts, sizes, strict=True):
            room = self._assembled[place : place + ranks * size]
            room.view(ranks, size).copy_(gathered[:, first : first + size])
            tensors.append(room[: part.param.numel()].view(part.global_shape))
            first, place = first + size, place + ranks * size
        return tensors


def _row_size(part: ShardedParam) -> int:
    return part.param.numel() // max(part.global_shape[0], 1)


def _padded(part: ShardedParam) -> Tensor:
    """This rank's rows, filled up with zeros to a full chunk."""
    local, missing = part.local, part.chunk - part.local.shape[0]
    return torch.cat([local, local.new_zeros((missing, *local.shape[1:]))]) if missing else local.contiguous()


def _fitting(buffer: Tensor | None, size: int, like: Tensor) -> Tensor:
    if buffer is not None and buffer.numel() >= size and buffer.dtype == like.dtype:
        return buffer
    return like.new_empty(size)
