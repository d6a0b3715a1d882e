"""Moves the policy's weights from the training engine into the rollout engine of the same ranks and proves that they arrived.

An engine's first update goes through its own loader as a stream of full tensors, which proves that both engines describe
correctly what they hold.  From then on a plan, made once, moves every part straight from where it is to where it is needed, into
the live weights.  Each update is compared weight by weight: every step of a policy gradient is wrong when the two differ,
and nothing else would say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.training.base import TrainEngine
from rlhub.protocol.weights.fingerprint import combine
from rlhub.protocol.weights.pieces import Piece
from rlhub.sharding_manager.held import Held
from rlhub.sharding_manager.layout_exchange import Member, exchange_members, this_node
from rlhub.sharding_manager.links import Links
from rlhub.sharding_manager.report import SyncReport
from rlhub.sharding_manager.route import BUFFER_BUCKETS, Route, make_route
from rlhub.sharding_manager.shared_weights import SharedWeights
from rlhub.sharding_manager.stream import CheckedStream, check_range, raise_first

__all__ = ["ShardingManager", "SyncReport"]


class ShardingManager:
    """One a rank, between its training engine and its rollout engine.

    bucket_bytes: size of the buckets in which weights travel; extra memory is at most two buckets, or the largest tensor.
    check: False skips fingerprints and the reading back (names are still compared).  timeout_s: of every wait for a peer.
    share: after the first update ranks of one machine keep one copy of equal engines' weights (CPU); all ranks say the same.
    """

    def __init__(
        self,
        train: TrainEngine,
        rollout: RolloutEngine,
        *,
        bucket_bytes: int,
        check: bool = True,
        timeout_s: float = 1800.0,
        share: bool = True,
    ) -> None:
        self._train = train
        self._rollout = rollout
        self._bucket_bytes = bucket_bytes
        self._check = check
        self._timeout_s = timeout_s
        self._share = share
        self._shared: SharedWeights | None = None
        self._route: Route | None = None

    def sync(self, version: int) -> SyncReport:
        """Give the rollout engine the trainer's present weights as policy `version`.

        Every rank calls it, and it blocks.  The trainer is brought to the device for the transfer and offloaded after it;
        the engine takes its weights' memory before and its cache's memory after that, so the two never add up.
        Raises WeightMismatchError, on every rank, naming the first weight that differs, is missing or is not expected; the
        engine then refuses to generate until a whole update.
        """
        start = time.perf_counter()
        self._train.onload()
        self._rollout.wake_up(weights_only=True)
        if self._route is None:
            report = self._stream(version)
            self._route = self._make_route(version)
        else:
            report = self._move(self._route, version)
        check_range(self._rollout)
        self._train.offload()
        self._rollout.wake_up()
        report.seconds = time.perf_counter() - start
        return report

    def _agree(self, number: int) -> int:
        values = torch.tensor(number, device=self._train.device)
        return int(self._train.reduce(values, "min", every_rank=True))

    def _stream(self, version: int) -> SyncReport:
        """Through the engine's own loader."""
        stream = CheckedStream(self._rollout, own=self._train.local_weights() or (), check=self._check)
        buckets = self._train.named_weights(bucket_bytes=self._bucket_bytes)
        self._rollout.update_weights(stream.passing(buckets), version)
        with self._rollout.overwriting(version):  # what differs must not serve
            stream.compare(self._agree)
        return SyncReport(
            seconds=0.0,
            bytes=stream.bytes,
            num_weights=len(stream.names),
            version=version,
            fingerprint=combine(stream.fingerprints.items()),
        )

    def _make_route(self, version: int) -> Route | None:
        """The plan over all ranks, and the memory that they share; None where the weights exist only as a stream."""
        pieces = self._train.local_weights()
        if pieces is None:
            return None
        links = Links.of_job(self._train.device, self._timeout_s)
        if links is not None and self._share:
            with self._rollout.overwriting(version):
                self._shared = SharedWeights.share(links, self._rollout)
        member = Member(
            side="both",
            node=this_node(),
            device=self._train.device.type,
            sources=Held(pieces).infos(),
            destinations=Held(self._destinations()).infos(),
        )
        members = exchange_members(links, member)
        return make_route(links, members, memory_bytes=self._bucket_bytes * BUFFER_BUCKETS, check=self._check)

    def _move(self, route: Route, version: int) -> SyncReport:
        """By the plan, into the live weights."""
        pieces = self._train.local_weights()
        assert pieces is not None
        with self._rollout.overwriting(version), self._writing():
            outcome = route.execution.run(Held(pieces), Held(self._destinations()))
            if self._check:
                raise_first(route.names, outcome.differing, route.agree)
        return route.report(version, combine(outcome.values) if self._check else "")

    def _destinations(self) -> Iterable[Piece]:
        """What this rank writes and reads back."""
        pieces = self._rollout.live_weights()
        return pieces if self._shared is None else self._shared.parts(pieces)

    def _writing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._shared is None else self._shared.writing(self._rollout.live_weights())
