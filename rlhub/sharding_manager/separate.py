"""Weights between two separate pools of processes: trainers send, rollout engines of other processes receive.

Each process has one half, a WeightSender for its training engine or a WeightReceiver for its rollout engine, and all halves
join at an address.  Ranks are counted senders first: with S senders and R receivers, sender s is rank s and receiver r is rank
S + r of S + R; rank 0 serves the address.

    sender = WeightSender(train, bucket_bytes=...)          receiver = WeightReceiver(rollout, bucket_bytes=...)
    sender.connect(address, port, rank, world_size, timeout_s)      receiver.connect(...)     once, all at the same time
    sender.send(version)                                    receiver.receive(version)         as often as the weights change
    sender.close()                                          receiver.close()

All processes of both pools call `connect`, `send` and `receive` together, and these block; `layout()` is local.  The first
transfer goes through the rollout engine's own loader (see `update_by_stream`), and so does every one to an engine that stores
weights quantized.  All others follow the plan, from
WeightSender to WeightReceiver, whose Routes share one plan and one kind of Transport.  During a transfer, and after one that
failed, the rollout engine refuses to generate.

Every process that is still alive raises WeightMismatchError (a weight differs), ReshardError (the models differ),
WorkerDiedError (naming the rank that is gone), DeadlineError (a peer does not answer) or EngineError (the pools are not at the
same version).  After an error the connection must not be used again: call `connect` on all processes.
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
from rlhub.protocol.weights.pieces import PieceInfo, is_quantized, num_elements, whole
from rlhub.sharding_manager.layout_exchange import DTYPES, Member, Side, exchange_members, this_node
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.manager import StreamedDescription, update_by_stream
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.route import BUFFER_BUCKETS, Route, SyncReport, check_range, make_route, raise_first
from rlhub.sharding_manager.transport import aligned

DEFAULT_TIMEOUT_S = 600.0
END_OF_STREAM = 0  # sent instead of the length of a bucket's header


class _Half(ABC):
    """The common part of both halves.  bucket_bytes: as in ShardingManager; the same number in all processes."""

    side: Side

    def __init__(self, device: torch.device, *, bucket_bytes: int, check: bool) -> None:
        self._device, self._bucket_bytes, self._check = device, bucket_bytes, check
        self._peers: Peers | None = None
        self._route: Route | None = None
        self._sides: list[Side] = []

    def connect(self, address: str, port: int, rank: int, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Joins the other processes; blocks until all have joined.

        timeout_s: the limit of this and of every later wait for a peer, in seconds.
        """
        self.close()
        peers = Peers.join(address, port, rank=rank, size=world_size, device=self._device, timeout_s=timeout_s)
        members = exchange_members(peers, self._member(with_layout=False))
        self._sides = [member.side for member in members]
        if self._sides != sorted(self._sides, reverse=True) or len(set(self._sides)) != 2:
            raise EngineError(f"ranks must be counted senders first, with one of each at least; by rank they are {self._sides}")
        peers.labels = [f"weight {side}" for side in self._sides]
        self._peers = peers

    @abstractmethod
    def layout(self) -> list[PieceInfo]:
        """Returns the descriptions of this process's pieces; local."""

    def close(self) -> None:
        """Leaves the group; peers that still wait for this process get a WorkerDiedError.  Idempotent."""
        if self._peers is not None:
            self._peers.close()
        self._peers, self._route = None, None

    def _member(self, *, with_layout: bool) -> Member:
        pieces = self.layout() if with_layout else []
        sources, destinations = (pieces, []) if self.side == "sender" else ([], pieces)
        return Member(side=self.side, node=this_node(), device=self._device.type, sources=sources, destinations=destinations)

    def _transfer(self, version: int, stream: Callable[[Peers], SyncReport], move: Callable[[Route], SyncReport]) -> SyncReport:
        """Does one update, by stream the first time and by the plan from then on.

        Any failure closes the connection, so that no peer waits for this process.
        """
        peers, start = self._peers, time.perf_counter()
        if peers is None:
            raise EngineError("the pools are not connected: call connect on all processes first")
        try:
            self._check_agreement(peers, version)
            if self._route is None:
                report = stream(peers)
                self._route = self._plan(peers)
            else:
                report = move(self._route)
        except BaseException:
            self.close()
            raise
        report.seconds = time.perf_counter() - start
        return report

    def _check_agreement(self, peers: Peers, version: int) -> None:
        """Raises EngineError unless all processes call with the same version, and either all or none have a plan."""
        here = torch.tensor([version, int(self._route is not None)])
        states = {(int(version), int(planned)) for version, planned in peers.all_gather(here)}
        if len(states) > 1:
            raise EngineError(
                f"the pools do not agree on the update: (version, has a plan) are {sorted(states)}; every process must take part "
                "in every update, in the same order"
            )

    def _plan(self, peers: Peers) -> Route | None:
        members = exchange_members(peers, self._member(with_layout=True))
        streamed = not any(member.sources for member in members)  # the weights exist only as a stream
        if streamed or any(is_quantized(member.destinations) for member in members):
            return None
        return make_route(peers, members, memory_bytes=self._bucket_bytes * BUFFER_BUCKETS, check=self._check)


class WeightSender(_Half):
    """The half of a training engine's process; every rank of the engine has one."""

    side: Side = "sender"

    def __init__(self, train: TrainEngine, *, bucket_bytes: int, check: bool = True) -> None:
        super().__init__(train.device, bucket_bytes=bucket_bytes, check=check)
        self._train = train

    def layout(self) -> list[PieceInfo]:
        return LocalPieces(self._train.local_weights() or ()).infos()

    def send(self, version: int) -> SyncReport:
        """Gives all receivers the trainer's present weights as policy `version`."""
        self._train.onload()
        report = self._transfer(version, lambda peers: self._stream(peers, version), lambda route: self._move(route, version))
        self._train.offload()
        return report

    def _stream(self, peers: Peers, version: int) -> SyncReport:
        """Sends every bucket from sender 0 to every receiver; the other senders take part in gathering it."""
        description = StreamedDescription(self._train.local_weights() or () if self._check else ())
        receivers = [rank for rank, side in enumerate(self._sides) if side == "receiver"] if peers.rank == 0 else []
        num_bytes = 0
        for bucket in self._train.published_weights(bucket_bytes=self._bucket_bytes):
            for name, tensor in bucket:
                description.note(name, tensor)
                num_bytes += tensor.nbytes
            if receivers:
                _send_bucket(peers, receivers, bucket)
        for pending in peers.exchange([(peer, torch.tensor([END_OF_STREAM])) for peer in receivers], []):
            pending.wait()
        if self._check:
            raise_first(description.names, [], peers.minimum)
            description.confirm(peers.minimum)
        return SyncReport(bytes=num_bytes, num_weights=len(description.names), version=version, fingerprint="")

    def _move(self, route: Route, version: int) -> SyncReport:
        pieces = self._train.local_weights()
        assert pieces is not None
        return route.run(pieces, (), version)


class WeightReceiver(_Half):
    """The half of a rollout engine's process; every rank of the engine, and of every replica, has one."""

    side: Side = "receiver"

    def __init__(self, rollout: RolloutEngine, device: torch.device, *, bucket_bytes: int, check: bool = True) -> None:
        super().__init__(device, bucket_bytes=bucket_bytes, check=check)
        self._rollout = rollout

    def layout(self) -> list[PieceInfo]:
        return LocalPieces(self._rollout.live_weights()).infos()

    def receive(self, version: int) -> SyncReport:
        """Receives the senders' weights as policy `version`; no request may be running."""
        self._rollout.wake_up(weights_only=True)
        report = self._transfer(version, lambda peers: self._stream(peers, version), lambda route: self._move(route, version))
        check_range(self._rollout.live_weights())
        self._rollout.wake_up()
        return report

    def _stream(self, peers: Peers, version: int) -> SyncReport:
        return update_by_stream(self._rollout, _received_buckets(peers), version, check=self._check, agree=peers.minimum)

    def _move(self, route: Route, version: int) -> SyncReport:
        with self._rollout.overwriting(version):
            return route.run((), self._rollout.live_weights(), version)


# The first transfer: full tensors, with a header of JSON before each bucket


def _send_bucket(peers: Peers, receivers: list[int], bucket: WeightBucket) -> None:
    header = json.dumps([[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in bucket]).encode()
    words, text = torch.tensor([len(header)]), torch.frombuffer(bytearray(header), dtype=torch.uint8)
    payload = torch.empty(sum(aligned(tensor.nbytes) for _, tensor in bucket), dtype=torch.uint8, device=peers.device)
    start = 0
    for _, tensor in bucket:
        place = payload[start : start + tensor.nbytes]
        place.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        start += aligned(tensor.nbytes)
    sends = [(peer, part) for part in (words, text, payload) for peer in receivers]
    for pending in [pending for send in sends for pending in peers.exchange([send], [])]:
        pending.wait()


def _received_buckets(peers: Peers) -> Iterator[WeightBucket]:
    """Yields the buckets of sender 0.  Each has memory of its own, so the caller may keep it."""
    while length := int(_receive(peers, torch.empty(1, dtype=torch.int64))):
        header: list[Any] = json.loads(bytes(_receive(peers, torch.empty(length, dtype=torch.uint8)).numpy()))
        entries = [(str(name), tuple(map(int, shape)), DTYPES[dtype]) for name, shape, dtype in header]
        lengths = [num_elements(whole(shape)) * dtype.itemsize for _, shape, dtype in entries]
        payload = _receive(peers, torch.empty(sum(map(aligned, lengths)), dtype=torch.uint8, device=peers.device))
        bucket, start = [], 0
        for (name, shape, dtype), size in zip(entries, lengths, strict=True):
            bucket.append((name, payload[start : start + size].view(dtype).view(shape)))
            start += aligned(size)
        yield bucket


def _receive(peers: Peers, out: Tensor) -> Tensor:
    for pending in peers.exchange([], [(0, out)]):
        pending.wait()
    return out
