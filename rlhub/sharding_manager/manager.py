"""Moves the policy's weights from the training engine into the rollout engine of the same ranks and proves that they arrived.

An engine's first update goes through its own loader as a stream of full tensors, which proves that both engines describe
correctly what they hold.  From then on a plan, made once, moves every part straight from where it is to where it is needed, into
the live weights.  Each update is compared weight by weight: every step of a policy gradient is wrong when the two differ,
and nothing else would say so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.training.base import TrainEngine
from rlhub.sharding_manager.execution import Execution, rank_plan
from rlhub.sharding_manager.held import Held
from rlhub.sharding_manager.layout_exchange import Member, check_devices, exchange_members, nodes_of, this_node
from rlhub.sharding_manager.links import Links
from rlhub.sharding_manager.plan import make_plan
from rlhub.sharding_manager.schedule import schedule
from rlhub.sharding_manager.stream import CheckedStream, raise_first
from rlhub.sharding_manager.transports.choice import choose_transport
from rlhub.utils.fingerprint import combine

BUFFER_BUCKETS = 2  # what a process may hold of messages while a planned update runs, in buckets


@dataclass(slots=True, kw_only=True)
class SyncReport:
    """One sync.  bytes: of the full weights in the engine's dtype; wire_bytes: what this rank received from others (None when
    the weights were streamed); fingerprint: of this rank's parts, empty when the check is off; equal for equal weights moved
    the same way."""

    seconds: float
    bytes: int
    num_weights: int
    version: int
    fingerprint: str
    wire_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class _Route:
    """The plan, ready to run again and again.  names: of all weights, in an order that all ranks share."""

    execution: Execution
    names: list[str]
    bytes: int
    wire_bytes: int


class ShardingManager:
    """One a rank, between its training engine and its rollout engine.

    bucket_bytes: size of the buckets in which weights travel; extra memory is at most two buckets, or the largest tensor.
    check: False skips fingerprints and the reading back (names are still compared).  timeout_s: of every wait for a peer.
    """

    def __init__(
        self, train: TrainEngine, rollout: RolloutEngine, *, bucket_bytes: int, check: bool = True, timeout_s: float = 1800.0
    ) -> None:
        self._train = train
        self._rollout = rollout
        self._bucket_bytes = bucket_bytes
        self._check = check
        self._timeout_s = timeout_s
        self._route: _Route | None = None

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
            self._route = self._make_route()
        else:
            report = self._move(self._route, version)
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

    def _make_route(self) -> _Route | None:
        """The plan over all ranks; None where the weights exist only as a stream."""
        pieces = self._train.local_weights()
        if pieces is None:
            return None
        links = Links.of_job(self._train.device, self._timeout_s)
        sources, destinations = Held(pieces).infos(), Held(self._rollout.live_weights()).infos()
        member = Member(side="both", node=this_node(), device=self._train.device.type, sources=sources, destinations=destinations)
        members = exchange_members(links, member)
        check_devices(members)
        ranks = range(len(members))
        plan = make_plan(
            [member.sources for member in members],
            [member.destinations for member in members],
            source_processes=ranks,
            destination_processes=ranks,
            nodes=nodes_of(members),
        )
        rank = links.rank if links else 0
        transport = choose_transport(links, members, self._bucket_bytes * BUFFER_BUCKETS)
        rounds = schedule(plan, transport.round_bytes) if transport else []
        mine = rank_plan(plan, rounds, source=rank, destination=rank, source_peers=ranks, destination_peers=ranks)
        full = {info.name: info for member in members for info in member.destinations}
        return _Route(
            execution=Execution(mine, transport, links, check=self._check),
            names=sorted(full),
            bytes=sum(torch.Size(info.shape).numel() * info.dtype.itemsize for info in full.values()),
            wire_bytes=plan.received_bytes[rank],
        )

    def _move(self, route: _Route, version: int) -> SyncReport:
        """By the plan, into the live weights."""
        pieces = self._train.local_weights()
        assert pieces is not None
        with self._rollout.overwriting(version):
            outcome = route.execution.run(Held(pieces), Held(self._rollout.live_weights()))
            if self._check:
                raise_first(route.names, outcome.differing, self._agree)
        return SyncReport(
            seconds=0.0,
            bytes=route.bytes,
            num_weights=len(route.names),
            version=version,
            fingerprint=combine(outcome.values) if self._check else "",
            wire_bytes=route.wire_bytes,
        )
