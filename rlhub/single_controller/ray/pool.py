"""Reserves the places of resource pools as placement groups, and gives each rank a bundle of a node.

One placement group per node entry, packed strictly, ordered by node address, so that ranks fall on the same nodes again
when a job is restarted.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlhub.errors import ConfigError, ResourceError
from rlhub.single_controller.ray.nodes import describe_nodes, live_nodes
from rlhub.single_controller.ray.watch import check_cluster, loss, while_it_lives
from rlhub.single_controller.resources import ResourcePool, check_mapping

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class RankSlot:
    """The place of one rank."""

    group: PlacementGroup
    bundle: int
    node_id: str
    node_ip: str


class RayResourcePool(ResourcePool):
    """A ResourcePool whose places are reserved on first use.

    use_gpu: a rank takes a GPU and a CPU, else a logical CPU.  amounts: what it takes instead, by Ray's names
    (CPU, GPU).  deadline_s: longest wait for the reservation.
    wait_for_nodes: False fails at once when the cluster as it is could never hold the pool; True waits for nodes to join.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        max_colocate_count: int = 1,
        *,
        name_prefix: str = "rlhub",
        deadline_s: float = 120.0,
        wait_for_nodes: bool = False,
        detached: bool = False,
        amounts: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix
        self.deadline_s = deadline_s
        self.wait_for_nodes = wait_for_nodes
        self.detached = detached
        self.amounts = amounts
        self._slots: list[RankSlot] | None = None

    def slots(self) -> list[RankSlot]:
        """Returns where each rank goes, in rank order.  Raises ResourceError when the cluster cannot give that in time."""
        if self._slots is None:
            self._slots = self._reserve()
        return self._slots

    def release(self) -> None:
        """Gives the places back (also those that pools split off this one use)."""
        groups = {slot.group.id: slot.group for slot in self._slots or ()}
        self._slots = None
        if ray.is_initialized() and loss() is None:  # else nobody is there to take them
            while_it_lives(lambda: [remove_placement_group(group) for group in groups.values()])

    def bundle(self) -> dict[str, float]:
        """Returns what one rank reserves."""
        if self.amounts is not None:
            return {kind: amount for kind, amount in self.amounts.items() if amount}
        return {"CPU": float(self.max_colocate_count), **({"GPU": 1.0} if self.use_gpu else {})}

    def actor_resources(self) -> dict[str, float]:
        """Returns what one process of a rank takes of its bundle, as options of a Ray actor."""
        return {"num_cpus": 1.0, "num_gpus": 1.0 / self.max_colocate_count if self.use_gpu else 0.0}

    def _reserve(self) -> list[RankSlot]:
        deadline = time.monotonic() + self.deadline_s
        if not self.wait_for_nodes and not could_fit([self]):
            raise _refusal([self], "the cluster is too small for it")
        lifetime = "detached" if self.detached else None
        groups: list[PlacementGroup] = []
        # Largest first, each before the next: a small group placed early may take the space that a large one needs.
        for count in sorted(self.process_on_nodes, reverse=True):
            groups.append(placement_group([self.bundle()] * count, strategy="STRICT_PACK", lifetime=lifetime))
            if not self._wait(groups[-1], deadline):
                for reserved in groups:
                    remove_placement_group(reserved)
                raise _refusal([self], f"not given within {self.deadline_s:g} s (trainer.deadline_s.resources)")
        return self._ordered(groups)

    def _wait(self, group: PlacementGroup, deadline: float) -> bool:
        while time.monotonic() < deadline:
            check_cluster()
            if group.wait(timeout_seconds=max(1, min(10, round(deadline - time.monotonic())))):
                return True
            logger.info("waiting for %s; %s", self.describe(), describe_nodes())
        return False

    def _ordered(self, groups: Sequence[PlacementGroup]) -> list[RankSlot]:
        """Returns the slots, node entries of equal size sorted by address; the sizes stay in their order."""
        addresses = {node.node_id: node.address for node in live_nodes()}
        placed = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
        order = sorted(range(len(groups)), key=lambda i: (_address_key(addresses[placed[i][0]]), placed[i][0]))
        slots: list[RankSlot] = []
        for count in self.process_on_nodes:
            chosen = next(i for i in order if len(placed[i]) == count)
            order.remove(chosen)
            nodes = placed[chosen]
            slots += [
                RankSlot(group=groups[chosen], bundle=bundle, node_id=nodes[bundle], node_ip=addresses[nodes[bundle]])
                for bundle in range(count)
            ]
        return slots

    def describe(self) -> str:
        per_rank = " and ".join(f"{amount:g} {kind}" for kind, amount in self.bundle().items())
        counts = " + ".join(map(str, self.process_on_nodes))
        return f"{self.world_size} worker processes ({counts} on {len(self.process_on_nodes)} node(s), {per_rank} each)"


def could_fit(pools: Sequence[RayResourcePool]) -> bool:
    """Returns whether the nodes' totals hold all pools: first-fit decreasing, enough because entries are packed whole."""
    totals = [node.total for node in live_nodes()]
    for count, bundle in sorted(((count, pool.bundle()) for pool in pools for count in pool.process_on_nodes), key=_largest):
        need = {kind: amount * count for kind, amount in bundle.items()}
        node = next((total for total in totals if all(total.get(kind, 0) >= amount for kind, amount in need.items())), None)
        if node is None:
            return False
        for kind, amount in need.items():
            node[kind] -= amount
    return True


def _largest(entry: tuple[int, dict[str, float]]) -> int:
    return -entry[0]


def _refusal(pools: Sequence[RayResourcePool], why: str) -> ResourceError:
    asked = " and ".join(pool.describe() for pool in pools)
    knobs = f"lower trainer.n_gpus_per_node{', trainer.nnodes or trainer.pools' if len(pools) > 1 else ' or trainer.nnodes'}"
    more = ", or set trainer.device=cpu" if pools[0].use_gpu else ", or raise trainer.ray_init.num_cpus (logical CPUs)"
    return ResourceError(f"asked for {asked}: {why}. There is: {describe_nodes()}. To mend it, {knobs}{more}")


def _address_key(address: str) -> tuple[int, int | str]:
    """Returns a key that orders IP addresses by number and names by the alphabet."""
    try:
        return 0, int(ipaddress.ip_address(address))
    except ValueError:
        return 1, address


def split_resource_pool(pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Cuts a pool into pools of consecutive ranks over the same places; sizes must add up to the pool's."""
    sizes = [split_size] * (pool.world_size // max(split_size, 1)) if isinstance(split_size, int) else list(split_size)
    if not sizes or min(sizes) < 1 or sum(sizes) != pool.world_size:
        raise ConfigError(
            f"cannot split a pool of {pool.world_size} ranks into {split_size}: the parts must be positive and add up"
        )
    slots, parts = pool.slots(), []
    for size in sizes:
        parts.append(_over(pool, slots[:size]))
        slots = slots[size:]
    return parts


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """Returns one pool over the places of both, ranks of `first` before those of `second`."""
    if first.use_gpu != second.use_gpu or first.max_colocate_count != second.max_colocate_count:
        raise ConfigError("pools can be merged only when both use GPUs or both do not, with the same max_colocate_count")
    return _over(first, first.slots() + second.slots())


def _over(pool: RayResourcePool, slots: list[RankSlot]) -> RayResourcePool:
    counts: list[int] = []
    for i, slot in enumerate(slots):
        if i and slots[i - 1].group.id == slot.group.id:
            counts[-1] += 1
        else:
            counts.append(1)
    part = RayResourcePool(counts, pool.use_gpu, pool.max_colocate_count, name_prefix=pool.name_prefix, detached=pool.detached)
    part._slots = list(slots)
    return part


class ResourcePoolManager:
    """The pools of a run by name, and the pool of each role.

    resource_pool_spec: pool name -> ranks per node.  mapping: role -> pool name.  options: keywords of RayResourcePool.
    """

    def __init__(self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[str, str], **options: Any) -> None:
        check_mapping(resource_pool_spec, mapping)
        self.mapping = dict(mapping)
        self.resource_pools = {
            name: RayResourcePool(counts, name_prefix=name, **options) for name, counts in resource_pool_spec.items()
        }

    def create_resource_pool(self) -> None:
        """Reserves all pools now; gives back what was reserved when one cannot be had.  What could never fit fails at once."""
        pools = list(self.resource_pools.values())
        if not any(pool.wait_for_nodes for pool in pools) and not could_fit(pools):
            raise _refusal(pools, "the cluster is too small for it")
        try:
            for pool in pools:
                pool.slots()
        except ResourceError:
            self.release()
            raise

    def get_resource_pool(self, role: str) -> RayResourcePool:
        return self.resource_pools[self.mapping[role]]

    def roles_of(self, pool_name: str) -> list[str]:
        return [role for role, pool in self.mapping.items() if pool == pool_name]

    def release(self) -> None:
        for pool in self.resource_pools.values():
            pool.release()
