"""Streaming full weights out of the shards, in buckets, under Hugging Face names.

The shards of a bucket travel together.  Buffers are reused from bucket to bucket, so the extra memory is about two
buckets (the gathered shards and the tensors assembled from them), or one tensor where that is larger than a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.engines.training.fsdp.sharding import Layout, ShardedParam
from rlhub.models.experts import unfused_tensors


@dataclass(slots=True, kw_only=True)
class Entry:
    """A weight of the stream, its name there, and the adapter to merge into it, if it has one: W + scaling x B A."""

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
    entries: list[Entry] = field(default_factory=list)
    num_bytes: int = 0


def plan_buckets(entries: Sequence[Entry], bucket_bytes: int) -> list[Bucket]:
    """Returns buckets of neighbouring weights of one dtype up to `bucket_bytes`; a larger weight is a bucket of its own."""
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


class FSDPWeightStream:
    """Iterates once over the weights; TrainEngine.named_weights says what callers may rely on."""

    def __init__(self, entries: Sequence[Entry], layout: Layout, bucket_bytes: int) -> None:
        self.layout = layout
        self.buckets = plan_buckets(entries, bucket_bytes)
        shared = [bucket for bucket in self.buckets if bucket.num_bytes <= bucket_bytes or len(_parts(bucket)) > 1]
        self._largest = max(map(self._num_elements, shared), default=0)
        self._gathered: Tensor | None = None
        self._assembled: Tensor | None = None

    def _num_elements(self, bucket: Bucket) -> int:
        """Returns the elements of a bucket when every rank's part is filled up to a full chunk."""
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
            return weight
        low, high = full[id(entry.lora_a)], full[id(entry.lora_b)]
        return torch.addmm(weight, high, low, alpha=entry.scaling)

    def _full(self, parts: list[ShardedParam]) -> list[Tensor]:
        """Returns the whole tensors; live views where this rank has everything."""
        if self.layout.shard_size == 1:
            return [part.local for part in parts]
        if len(parts) == 1:
            return [self._gather_one(parts[0])]
        return self._gather_many(parts)

    def _gather_one(self, part: ShardedParam) -> Tensor:
        """Gathers into place, without a copy after the all-gather.  A weight larger than a bucket has memory of its own, for
        which the buffers are freed."""
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
        """Fills row r of `out` (ranks, elements) with rank r's rows of the parts, each in a full chunk, one after the other.

        In place, for a send buffer would be memory too.  gloo's own all-gather makes a second copy of everything, so on CPU
        each rank broadcasts its row.
        """
        group, first = self.layout.shard_group, 0
        own = out[self.layout.shard_rank]
        for part in parts:
            own[first : first + part.local.numel()] = part.local.flatten()
            first += part.chunk * _row_size(part)
        if out.device.type != "cpu":
            dist.all_gather_single(out.view(-1), own, group=group)
            return
        works = [dist.broadcast(row, group=group, group_src=rank, async_op=True) for rank, row in enumerate(out)]
        for work in works:
            assert work is not None
            work.wait()

    def _buffer(self, buffer: Tensor | None, like: Tensor) -> Tensor:
        """Returns one allocation of the largest bucket's size, which the other buckets use too."""
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


def _parts(bucket: Bucket) -> list[ShardedParam]:
    return [part for entry in bucket.entries for part in entry.parts]


def _row_size(part: ShardedParam) -> int:
    return part.param.numel() // max(part.global_shape[0], 1)
