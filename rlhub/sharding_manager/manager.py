"""Moves the policy's weights from the training engine into the rollout engine of the same ranks and proves that they arrived.

An engine's first update goes through its own loader as a stream of full tensors, which proves that both engines describe
correctly what they hold.  From then on a plan, made once, moves every part straight from where it is to where it is needed, into
the live weights.  Each update is compared weight by weight: every step of a policy gradient is wrong when the two differ,
and nothing else would say so.

A planned update passes three classes: ShardingManager wakes the engines and bars generation, Route moves this rank's parts and
compares them, Transport carries what goes to other ranks.
"""

from __future__ import annotations

import time

import torch

from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.training.base import TrainEngine
from rlhub.sharding_manager.first_update import update_by_stream
from rlhub.sharding_manager.layout_exchange import Member, exchange_members, this_node
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.route import BUFFER_BUCKETS, Route, SyncReport, check_range, make_route


class ShardingManager:
    """Every rank has one, between its training engine and its rollout engine.

    bucket_bytes: size of the buckets in which weights travel; extra memory is at most two buckets, or the largest tensor.
    check: False skips fingerprints and the reading back (names are still compared).  timeout_s: of every wait for a peer.
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
            self._route = self._make_route()
        else:
            report = self._move(self._route, version)
        check_range(self._rollout)
        self._train.offload()
        self._rollout.wake_up()
        report.seconds = time.perf_counter() - start
        return report

    def _stream(self, version: int) -> SyncReport:
        buckets = self._train.named_weights(bucket_bytes=self._bucket_bytes)
        own = self._train.local_weights() or ()
        return update_by_stream(self._rollout, buckets, version, own=own, check=self._check, agree=self._agree)

    def _agree(self, number: int) -> int:
        values = torch.tensor(number, device=self._train.device)
        return int(self._train.reduce(values, "min", every_rank=True))

    def _make_route(self) -> Route | None:
        """Plans with all ranks; returns None where the weights exist only as a stream."""
        pieces = self._train.local_weights()
        if pieces is None:
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
