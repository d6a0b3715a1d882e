"""Moves the policy's weights from the training engine into the rollout engine of the same ranks and proves that they arrived.

An engine's first update (`update_by_stream`) goes through its own loader as a stream of full tensors.  The loader and the
stream know nothing of regions, so this update proves the geometry that later updates write and read back through.  From then
on a plan, made once, moves every part straight from its source into the live weights.  Each update is compared weight by
weight: every step of a policy gradient is wrong when the two engines differ, and nothing else would report it.

An engine that stores weights quantized gets every update as a stream: parts that move by a plan may cut the blocks that share a
scale, and in the stream each receiving process has whole weights.  It quantizes them a bucket at a time, on the engine's device,
and what it reads back is compared with that.  Between ranks that all generate with whole copies this moves no more bytes.

A planned update passes three classes: ShardingManager wakes the engines and blocks generation, Route moves this rank's parts
and compares them, Transport carries the parts that go to other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlhub.engines.rollout.base import RolloutEngine, WeightBucket
from rlhub.engines.training.base import TrainEngine
from rlhub.errors import WeightMismatchError
from rlhub.protocol.weights.fingerprint import combine, fingerprint
from rlhub.protocol.weights.pieces import FP8, Piece, is_quantized, quantize, scales_name, take
from rlhub.sharding_manager.layout_exchange import Member, exchange_members, this_node
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.route import BUFFER_BUCKETS, Agree, Route, SyncReport, check_range, make_route, raise_first


class ShardingManager:
    """Moves weights from a training engine to a rollout engine; every rank has one, between its own two engines.

    bucket_bytes: the size of the buckets in which weights travel; extra memory is at most two buckets, or the largest tensor.
    check: False skips fingerprints and reading back; names are still compared.
    timeout_s: the limit of every wait for a peer, in seconds.
    """

    def __init__(
        self,
        train: TrainEngine,
        rollout: RolloutEngine,
        *,
        bucket_bytes: int,
        check: bool = True,
        timeout_s: float = 1800.0,
    ) -> None:
        self._train = train
        self._rollout = rollout
        self._bucket_bytes = bucket_bytes
        self._check = check
        self._timeout_s = timeout_s
        self._route: Route | None = None

    def sync(self, version: int) -> SyncReport:
        """Gives the rollout engine the trainer's present weights as policy `version`.

        Every rank calls it, and it blocks.  The trainer is brought to the device for the transfer and offloaded after it; the
        engine allocates its weights' memory before the transfer and its cache's memory after the offload, so the two never add
        up.  Raises WeightMismatchError, on every rank, naming the first weight that differs, is missing or is not expected;
        the engine then refuses to generate until a whole update.
        """
        start = time.perf_counter()
        self._train.onload()
        self._rollout.wake_up(weights_only=True)
        if self._route is None:
            report = self._stream(version)
            self._route = self._make_route()
        else:
            report = self._move(self._route, version)
        check_range(self._rollout.live_weights())
        self._train.offload()
        self._rollout.wake_up()
        report.seconds = time.perf_counter() - start
        return report

    def _stream(self, version: int) -> SyncReport:
        buckets = self._train.published_weights(bucket_bytes=self._bucket_bytes)
        own = self._train.local_weights() or ()
        return update_by_stream(self._rollout, buckets, version, own=own, check=self._check, agree=self._agree)

    def _agree(self, number: int) -> int:
        values = torch.tensor(number, device=self._train.device)
        return int(self._train.reduce(values, "min", every_rank=True))

    def _make_route(self) -> Route | None:
        """Plans the transfer with all ranks; returns None if the weights exist only as a stream, or go
        quantized."""
        pieces = self._train.local_weights()
        if pieces is None or is_quantized(self._rollout.live_weights()):
            return None
        peers = Peers.of_job(self._train.device, self._timeout_s)
        member = Member(
            side="both",
            node=this_node(),
            device=self._train.device.type,
            sources=LocalPieces(pieces).infos(),
            destinations=LocalPieces(self._rollout.live_weights()).infos(),
        )
        members = exchange_members(peers, member)
        return make_route(peers, members, memory_bytes=self._bucket_bytes * BUFFER_BUCKETS, check=self._check)

    def _move(self, route: Route, version: int) -> SyncReport:
        """Moves the weights by the plan, into the live weights."""
        pieces = self._train.local_weights()
        assert pieces is not None
        with self._rollout.overwriting(version):
            return route.run(pieces, self._rollout.live_weights(), version)


def update_by_stream(
    rollout: RolloutEngine,
    buckets: Iterable[WeightBucket],
    version: int,
    *,
    own: Iterable[Piece] = (),
    check: bool,
    agree: Agree,
) -> SyncReport:
    """Loads full tensors as policy `version` through the rollout engine's own loader, and compares the weights that arrived.

    All ranks call it together.  Raises WeightMismatchError, on every rank, for the first weight that differs, is missing or is
    not expected; the engine then refuses to generate.

    own: the training engine's pieces on this rank, which are compared with the stream; empty if its weights exist only as a
        stream.
    check: False skips fingerprints; names are still compared.
    agree: see Agree.
    """
    stream = _CheckedStream(rollout, own=own, check=check)
    rollout.update_weights(stream.passing(buckets), version)
    if check:
        with rollout.overwriting(version):  # an engine whose weights differ must not generate
            stream.compare(agree)
    return SyncReport(
        bytes=stream.bytes,
        num_weights=len(stream.names),
        version=version,
        fingerprint=combine(stream.fingerprints.items()) if check else "",
    )


class _CheckedStream:
    """Full tensors on their way into a rollout engine; see `update_by_stream`."""

    def __init__(self, rollout: RolloutEngine, *, own: Iterable[Piece], check: bool) -> None:
        self._rollout, self._check = rollout, check
        self._targets = {piece.name: piece for piece in rollout.live_weights()}
        self._description = StreamedDescription(own if check else ())
        self.fingerprints: dict[str, int] = {}
        self.bytes = 0
        self._passed: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Returns the names of the weights that have passed."""
        return self._description.names

    def passing(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """Yields the buckets in the engine's dtype and on its device, quantized where it stores them so, and takes their
        fingerprints."""
        for bucket in buckets:
            yield [entry for name, tensor in bucket for entry in self._pass(name, tensor.detach())]
        passed = self._passed
        missing = [name for name in self._targets if name not in passed]
        if missing:
            raise WeightMismatchError(
                f"the trainer sent {len(self.names)} weights, but not {missing[0]}, which the rollout engine has "
                f"({len(missing)} missing in all): do both run the same model?",
                weight=missing[0],
            )

    def _pass(self, name: str, tensor: Tensor) -> WeightBucket:
        if self._targets and name not in self._targets:
            raise WeightMismatchError(
                f"the trainer sent {name}, which the rollout engine does not have: do both run the same model?", weight=name
            )
        self._description.note(name, tensor)
        if self._targets and self._targets[name].tensor.dtype == FP8:
            weight, scales = quantize(tensor.to(self._targets[name].tensor.device))
            return [self._stored(name, weight), self._stored(scales_name(name), scales)]
        return [self._stored(name, tensor)]

    def _stored(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Returns a weight as the engine stores it."""
        self._passed.add(name)
        part = tensor
        if self._targets:  # before its first update an engine may have no weights, and then accepts any
            target = self._targets[name]
            tensor = tensor.to(device=target.tensor.device, dtype=target.tensor.dtype)
            part = take(tensor, target.region)
        self.bytes += tensor.nbytes
        if self._check:
            self.fingerprints[name] = fingerprint(part)
        return name, tensor

    def compare(self, agree: Agree) -> None:
        """Reads the live weights back.  Raises WeightMismatchError on every rank for the first weight that differs on any."""
        sent = self.fingerprints
        live = {piece.name: fingerprint(piece.tensor) for piece in self._rollout.live_weights() if piece.name in sent}
        wrong = {name for name, value in sent.items() if live.get(name) != value}
        # Every process counts the trainer's weights, and names the scales where these alone differ.
        names = [scales_name(name) if name not in wrong and scales_name(name) in wrong else name for name in self.names]
        raise_first(names, [name for name in names if name in wrong], agree)
        self._description.confirm(agree)


class StreamedDescription:
    """Checks that the pieces which a training engine describes on this rank are parts of the full weights that it streams."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)
        self._wrong: set[str] = set()
        self.names: list[str] = []

    def note(self, name: str, tensor: Tensor) -> None:
        """Compares a full weight of the stream with this rank's pieces of it."""
        self.names.append(name)
        for piece in self._pieces.get(name, ()):
            if piece.shape != tuple(tensor.shape) or fingerprint(take(tensor, piece.region)) != fingerprint(piece.tensor):
                self._wrong.add(name)

    def confirm(self, agree: Agree) -> None:
        """Raises WeightMismatchError on every rank for the first weight that any rank describes wrongly."""
        first = agree(min((self.names.index(name) for name in self._wrong), default=len(self.names)))
        if first < len(self.names):
            raise WeightMismatchError(
                f"the training engine's description of the part of {self.names[first]} that a rank holds does not fit the weight "
                "that it streams: planned updates would move the wrong part",
                weight=self.names[first],
            )
