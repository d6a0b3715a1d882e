"""Weights between two pools of processes: trainers send, rollout engines of other processes receive.

Each process has one half, WeightSender beside its training engine or WeightReceiver beside its rollout engine, and all halves
meet at an address.  Ranks are counted senders first: with S senders and R receivers, sender s is rank s and receiver r is
rank S + r of S + R; rank 0 serves the meeting point.

    sender = WeightSender(train, bucket_bytes=...)          receiver = WeightReceiver(rollout, bucket_bytes=...)
    sender.connect(address, port, rank, world_size, timeout_s)      receiver.connect(...)     once, all at the same time
    sender.send(version)                                    receiver.receive(version)         as often as the weights change
    sender.close()                                          receiver.close()

`connect`, `send` and `receive` are called by all processes of both pools together and block; `layout()` is local.  The first
transfer goes through the rollout engine's own loader (see `stream`), all later ones by the plan.  While a transfer runs, and
after one that failed, the rollout engine refuses to generate.  Errors, on every process that is still alive:
WeightMismatchError (a weight differs), ReshardError (not the same model), WorkerDiedError (naming the rank that is gone),
DeadlineError (a peer that does not come), EngineError (the pools are not at the same version).  After an error the
connection is not to be used again: `connect` anew on all processes.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlhub.engines.rollout.base import RolloutEngine, WeightBucket
from rlhub.engines.training.base import TrainEngine
from rlhub.errors import EngineError
from rlhub.protocol.weights.fingerprint import combine
from rlhub.protocol.weights.pieces import PieceInfo
from rlhub.protocol.weights.regions import num_elements, whole
from rlhub.sharding_manager.held import Held
from rlhub.sharding_manager.layout_exchange import DTYPES, Member, Side, exchange_members, this_node
from rlhub.sharding_manager.links import Links
from rlhub.sharding_manager.report import SyncReport
from rlhub.sharding_manager.route import BUFFER_BUCKETS, Route, make_route
from rlhub.sharding_manager.stream import CheckedStream, StreamedDescription, check_range, raise_first
from rlhub.sharding_manager.transports.base import ALIGNMENT

DEFAULT_TIMEOUT_S = 600.0
END_OF_STREAM = 0  # in place of the length of a bucket's header


class _Half(ABC):
    """What both halves do.  bucket_bytes: as in ShardingManager; the same number in all processes."""

    side: Side

    def __init__(self, device: torch.device, *, bucket_bytes: int, check: bool) -> None:
        self._device, self._bucket_bytes, self._check = device, bucket_bytes, check
        self._links: Links | None = None
        self._route: Route | None = None
        self._sides: list[Side] = []

    def connect(self, address: str, port: int, rank: int, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Join the other processes; blocks until all have.  timeout_s: of this and of every later wait for a peer."""
        self.close()
        links = Links.to_address(address, port, rank=rank, size=world_size, device=self._device, timeout_s=timeout_s)
        members = exchange_members(links, self._member(with_layout=False))
        self._sides = [member.side for member in members]
        if self._sides != sorted(self._sides, reverse=True) or len(set(self._sides)) != 2:
            raise EngineError(f"ranks must be counted senders first, with one of each at least; by rank they are {self._sides}")
        links.labels = [f"weight {side}" for side in self._sides]
        self._links = links

    @abstractmethod
    def layout(self) -> list[PieceInfo]:
        """What this process holds; local."""

    def close(self) -> None:
        """Leave the others, who get a WorkerDiedError if they still wait for this process.  Idempotent."""
        if self._links is not None:
            self._links.close()
        self._links, self._route = None, None

    def _member(self, *, with_layout: bool) -> Member:
        pieces = self.layout() if with_layout else []
        sources, destinations = (pieces, []) if self.side == "sender" else ([], pieces)
        return Member(side=self.side, node=this_node(), device=self._device.type, sources=sources, destinations=destinations)

    def _transfer(self, version: int, stream: Callable[[Links], SyncReport], move: Callable[[Route], SyncReport]) -> SyncReport:
        """One update: by stream the first time, by the plan from then on.  Whatever fails ends the connection, so that no
        peer waits for this process."""
        links, start = self._links, time.perf_counter()
        if links is None:
            raise EngineError("the pools are not connected: call connect on all processes first")
        try:
            self._meet(links, version)
            if self._route is None:
                report = stream(links)
                self._route = self._plan(links)
            else:
                report = move(self._route)
        except BaseException:
            self.close()
            raise
        report.seconds = time.perf_counter() - start
        return report

    def _meet(self, links: Links, version: int) -> None:
        """All processes come with the same version, and all with a plan or all without."""
        here = torch.tensor([version, int(self._route is not None)])
        found = {(int(version), int(planned)) for version, planned in links.all_gather(here)}
        if len(found) > 1:
            raise EngineError(
                f"the pools do not agree on the update: (version, has a plan) are {sorted(found)}; every process must take part "
                "in every update, in the same order"
            )

    def _plan(self, links: Links) -> Route | None:
        members = exchange_members(links, self._member(with_layout=True))
        if not any(member.sources for member in members):  # weights that exist only as a stream
            return None
        return make_route(links, members, memory_bytes=self._bucket_bytes * BUFFER_BUCKETS, check=self._check)


class WeightSender(_Half):
    """Beside a training engine.  Every rank of the engine has one."""

    side: Side = "sender"

    def __init__(self, train: TrainEngine, *, bucket_bytes: int, check: bool = True) -> None:
        super().__init__(train.device, bucket_bytes=bucket_bytes, check=check)
        self._train = train

    def layout(self) -> list[PieceInfo]:
        return Held(self._train.local_weights() or ()).infos()

    def send(self, version: int) -> SyncReport:
        """Give all receivers the trainer's present weights as policy `version`."""
        self._train.onload()
        report = self._transfer(version, lambda links: self._stream(links, version), lambda route: self._move(route, version))
        self._train.offload()
        return report

    def _stream(self, links: Links, version: int) -> SyncReport:
        """Sender 0 sends every bucket to every receiver; the others walk along, for gathering is collective."""
        description = StreamedDescription(self._train.local_weights() or () if self._check else ())
        receivers = [rank for rank, side in enumerate(self._sides) if side == "receiver"] if links.rank == 0 else []
        num_bytes = 0
        for bucket in self._train.named_weights(bucket_bytes=self._bucket_bytes):
            for name, tensor in bucket:
                description.see(name, tensor)
                num_bytes += tensor.nbytes
            if receivers:
                _send_bucket(links, receivers, bucket)
        for pending in links.exchange([(peer, torch.tensor([END_OF_STREAM])) for peer in receivers], []):
            pending.wait()
        if self._check:
            raise_first(description.names, [], links.minimum)
            description.confirm(description.names, links.minimum)
        return SyncReport(seconds=0.0, bytes=num_bytes, num_weights=len(description.names), version=version, fingerprint="")

    def _move(self, route: Route, version: int) -> SyncReport:
        pieces = self._train.local_weights()
        assert pieces is not None
        route.execution.run(Held(pieces), Held(()))
        if self._check:
            raise_first(route.names, [], route.agree)
        return route.report(version, "")


class WeightReceiver(_Half):
    """Beside a rollout engine.  Every rank of the engine has one, and every replica."""

    side: Side = "receiver"

    def __init__(self, rollout: RolloutEngine, device: torch.device, *, bucket_bytes: int, check: bool = True) -> None:
        super().__init__(device, bucket_bytes=bucket_bytes, check=check)
        self._rollout = rollout

    def layout(self) -> list[PieceInfo]:
        return Held(self._rollout.live_weights()).infos()

    def receive(self, version: int) -> SyncReport:
        """Take what the senders send as policy `version`; no request may be running."""
        self._rollout.wake_up(weights_only=True)
        report = self._transfer(version, lambda links: self._stream(links, version), lambda route: self._move(route, version))
        check_range(self._rollout)
        self._rollout.wake_up()
        return report

    def _stream(self, links: Links, version: int) -> SyncReport:
        stream = CheckedStream(self._rollout, check=self._check)
        self._rollout.update_weights(stream.passing(_received_buckets(links)), version)
        if self._check:
            with self._rollout.overwriting(version):  # what differs must not serve
                stream.compare(links.minimum)
        return SyncReport(
            seconds=0.0,
            bytes=stream.bytes,
            num_weights=len(stream.names),
            version=version,
            fingerprint=combine(stream.fingerprints.items()),
        )

    def _move(self, route: Route, version: int) -> SyncReport:
        with self._rollout.overwriting(version):
            outcome = route.execution.run(Held(()), Held(self._rollout.live_weights()))
            if self._check:
                raise_first(route.names, outcome.differing, route.agree)
        return route.report(version, combine(outcome.values) if self._check else "")


# The first transfer: full tensors, a header of JSON before each bucket


def _send_bucket(links: Links, receivers: list[int], bucket: WeightBucket) -> None:
    header = json.dumps([[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in bucket]).encode()
    words, text = torch.tensor([len(header)]), torch.frombuffer(bytearray(header), dtype=torch.uint8)
    payload = torch.empty(sum(_room(tensor.nbytes) for _, tensor in bucket), dtype=torch.uint8, device=links.device)
    start = 0
    for _, tensor in bucket:
        place = payload[start : start + tensor.nbytes]
        place.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        start += _room(tensor.nbytes)
    sends = [(peer, part) for part in (words, text, payload) for peer in receivers]
    for pending in [pending for send in sends for pending in links.exchange([send], [])]:
        pending.wait()


def _received_buckets(links: Links) -> Iterator[WeightBucket]:
    """What sender 0 sends; a bucket's memory is reused for nothing else, so it may be kept."""
    while length := int(_receive(links, torch.empty(1, dtype=torch.int64))):
        header: list[Any] = json.loads(bytes(_receive(links, torch.empty(length, dtype=torch.uint8)).numpy()))
        entries = [(str(name), tuple(map(int, shape)), DTYPES[dtype]) for name, shape, dtype in header]
        lengths = [num_elements(whole(shape)) * dtype.itemsize for _, shape, dtype in entries]
        payload = _receive(links, torch.empty(sum(map(_room, lengths)), dtype=torch.uint8, device=links.device))
        bucket, start = [], 0
        for (name, shape, dtype), size in zip(entries, lengths, strict=True):
            bucket.append((name, payload[start : start + size].view(dtype).view(shape)))
            start += _room(size)
        yield bucket


def _receive(links: Links, out: Tensor) -> Tensor:
    for pending in links.exchange([], [(0, out)]):
        pending.wait()
    return out


def _room(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
