"""Places actors: the replicas of the rollout service on GPUs of their own pool, on those of the actor's ranks, or simply on CPUs,
and the processes of simulators on a pool with what each of them reserves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhub.errors import ResourceError
from rlhub.single_controller.resources import AsyncActorOptions
from rlhub.single_controller.worker import VISIBLE_DEVICES, WorkerContext

if TYPE_CHECKING:
    from rlhub.single_controller.ray.pool import RayResourcePool


@dataclass(slots=True, kw_only=True, frozen=True)
class DevicePlace:
    """A rank's place.  node: the machine's address; device: the number of its GPU there, "" on CPU."""

    node: str
    device: str


def device_place(context: WorkerContext) -> DevicePlace:
    """Returns the place of the worker in this process."""
    visible = [name for name in os.environ.get(VISIBLE_DEVICES, "").split(",") if name]
    device = visible[context.local_rank] if context.device == "cuda" and visible else ""
    return DevicePlace(node=context.node, device=device)


class ReplicaPlaces:
    """Gives the replicas of a Ray backend their places, by number.

    counts: replicas on each machine of a pool of their own; actor_ranks: those of the actor, where they share its devices.
    devices_each: how many devices a replica has, all on one machine.  one_by_one: GPUs of a pool of their own are reserved when a
    replica starts and released by `free`, for others to use meanwhile; else all of them at once.
    """

    def __init__(
        self,
        *,
        device: str,
        counts: Sequence[int],
        actor_ranks: Sequence[DevicePlace] = (),
        deadline_s: float = 120.0,
        devices_each: int = 1,
        one_by_one: bool = False,
    ) -> None:
        self._device, self._counts, self._each = device, list(counts), devices_each
        self._actor_ranks = list(actor_ranks)
        self._deadline_s, self._one_by_one = deadline_s, one_by_one
        self._pool: RayResourcePool | None = None
        self._own: dict[int, RayResourcePool] = {}

    def reserve(self) -> None:
        """Reserves the pool's GPUs; raises ResourceError when the cluster cannot give them in time."""
        if self._device == "cuda" and not self._actor_ranks and not self._one_by_one:
            self._pool = self._reserved(self._counts)

    def _reserved(self, counts: Sequence[int]) -> RayResourcePool:
        from rlhub.single_controller.ray.pool import RayResourcePool

        pool = RayResourcePool(
            counts,
            use_gpu=True,
            deadline_s=self._deadline_s,
            wait_for_nodes=True,
            amounts={"CPU": 1.0, "GPU": float(self._each)},
        )
        pool.slots()
        return pool

    def free(self, number: int) -> None:
        """Releases the GPUs of a replica that has ended, where it had a reservation of its own."""
        if (pool := self._own.pop(number, None)) is not None:
            pool.release()

    def release(self) -> None:
        """Releases all GPUs."""
        for number in list(self._own):
            self.free(number)
        if self._pool is not None:
            self._pool.release()
            self._pool = None

    def options(self, number: int, common: AsyncActorOptions) -> AsyncActorOptions:
        """Returns the options of replica `number`.  Raises ResourceError where there is no device for it."""
        if self._device != "cuda":
            return replace(common, num_cpus=0.0, node_id=_node_by_number(number, self._counts))  # CPUs are shared, not reserved
        if self._pool is not None:
            slots = self._pool.slots()
            self._check(number, len(slots))
            return replace(common, num_gpus=float(self._each), slot=slots[number])
        if not self._actor_ranks:
            self._check(number, sum(self._counts))
            if number not in self._own:
                self._own[number] = self._reserved([1])
            return replace(common, num_gpus=float(self._each), slot=self._own[number].slots()[0])
        self._check(number, len(self._actor_ranks) // self._each)
        places = self._actor_ranks[number * self._each : (number + 1) * self._each]
        devices = ",".join(place.device for place in places)
        return replace(common, num_cpus=0.0, devices=devices, node_id=node_at(places[0].node))

    def _check(self, number: int, available: int) -> None:
        if number >= available:
            raise ResourceError(
                f"there are GPUs for {available} replicas of the rollout service, so replica {number} has none: remove another "
                "first, or give the rollout's pool more ranks"
            )


@dataclass(slots=True, kw_only=True)
class ActorPlaces:
    """Gives the actors of a pool their places, by number: machine by machine, in the order of the machines' addresses.

    counts: actors on each machine.  num_cpus, num_gpus: what each of them reserves.  Actors that reserve nothing share the CPUs;
    they go round where there are fewer machines.  deadline_s: longest wait for the reservation.
    """

    counts: Sequence[int]
    num_cpus: float
    num_gpus: float
    deadline_s: float = 120.0
    _pool: RayResourcePool | None = None

    def reserve(self) -> None:
        """Reserves the CPUs and GPUs; raises ResourceError when the cluster cannot give them in time."""
        from rlhub.single_controller.ray.pool import RayResourcePool

        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        if any(amounts.values()):
            self._pool = RayResourcePool(self.counts, deadline_s=self.deadline_s, amounts=amounts)
            self._pool.slots()

    def release(self) -> None:
        if self._pool is not None:
            self._pool.release()
            self._pool = None

    def options(self, number: int, common: AsyncActorOptions) -> AsyncActorOptions:
        """Returns the options of actor `number`."""
        if self._pool is not None:
            return replace(common, num_cpus=self.num_cpus, num_gpus=self.num_gpus, slot=self._pool.slots()[number])
        return replace(common, num_cpus=0.0, node_id=_node_by_number(number, self.counts))


def _node_by_number(number: int, counts: Sequence[int]) -> str:
    """Returns the node of an actor on CPUs: they fill machine by machine as the counts say, further ones go round; "" leaves it
    to Ray."""
    from rlhub.single_controller.ray.nodes import live_nodes

    nodes = sorted(live_nodes(), key=lambda node: node.address)
    if len(nodes) < 2 or len(counts) < 2:
        return ""
    entries = [entry for entry, count in enumerate(counts) for _ in range(count)]
    return nodes[entries[number % len(entries)] % len(nodes)].node_id


def node_at(address: str) -> str:
    """Returns Ray's name of the machine at this address."""
    from rlhub.single_controller.ray.nodes import live_nodes

    found = [node.node_id for node in live_nodes() if node.address == address]
    if not found:
        raise ResourceError(f"no live machine of the Ray cluster has the address {address}, where an actor's rank was")
    return found[0]


def is_one_machine() -> bool:
    """Returns whether all of the Ray cluster is on one machine."""
    from rlhub.single_controller.ray.nodes import live_nodes

    return len(live_nodes()) == 1
