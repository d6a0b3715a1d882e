"""Start a run on Ray: cluster, pools, one process per rank of each pool with the pool's roles in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhub.single_controller.colocate import create_colocated_worker_cls
from rlhub.single_controller.observer import CallObserver
from rlhub.single_controller.ray.cluster import Connection, connect
from rlhub.single_controller.ray.group import RayWorkerGroup
from rlhub.single_controller.ray.hosts import HostOptions, RayHosts
from rlhub.single_controller.ray.pool import ResourcePoolManager
from rlhub.single_controller.worker import ClassWithInitArgs, check_worker_env
from rlhub.single_controller.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

SHORTEST_CLOSE_S = 5.0
"""A pool gets at least so long to end, however long the others took."""


@dataclass(slots=True, kw_only=True)
class RayRunOptions:
    """See `rlhub.single_controller.launch.launch`.  pools: every pool's ranks per node, the first takes the roles that
    `placement` does not name."""

    pools: dict[str, list[int]]
    placement: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    ray_init: dict[str, Any] = field(default_factory=dict)
    start_deadline_s: float = 1800.0
    resource_deadline_s: float = 120.0
    cluster_deadline_s: float = 30.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()
    worker_env: dict[str, str] = field(default_factory=dict)
    observers: tuple[CallObserver, ...] = ()


class RayRun:
    """A running set of worker groups by role.  fused: by pool, all roles of its processes."""

    def __init__(self, connection: Connection, pools: ResourcePoolManager, fused: Mapping[str, RayWorkerGroup]) -> None:
        self._connection = connection
        self._pools = pools
        self._fused = dict(fused)
        spawned = {pool: group.spawn(pools.roles_of(pool)) for pool, group in self._fused.items()}
        self.groups: dict[str, WorkerGroup] = {role: spawned[pool][role] for role, pool in pools.mapping.items()}

    def close(self, deadline_s: float) -> None:
        """End the processes, give the places back, and stop the cluster if this run started it.

        A pool with a dead or hanging rank is ended first: what waits for it in other pools then fails and can close.
        """
        deadline = time.monotonic() + deadline_s
        try:
            for group in sorted(self._fused.values(), key=lambda group: not group.failed):
                group.close(max(SHORTEST_CLOSE_S, deadline - time.monotonic()))
        finally:
            _give_back(self._connection, self._pools)


def launch_ray(roles: Mapping[str, ClassWithInitArgs], options: RayRunOptions) -> RayRun:
    """See `rlhub.single_controller.launch.launch`."""
    check_worker_env(options.worker_env)
    main = next(iter(options.pools))
    mapping = {role: options.placement.get(role, main) for role in roles}
    used = {name: counts for name, counts in options.pools.items() if name in mapping.values()}
    connection = connect(
        options.ray_init,
        device=options.device,
        num_ranks=sum(map(sum, used.values())),
        deadline_s=options.resource_deadline_s,
        lost_after_s=options.cluster_deadline_s,
    )
    pools: ResourcePoolManager | None = None
    try:
        pools = ResourcePoolManager(
            used,
            mapping,
            use_gpu=options.device == "cuda",
            deadline_s=options.resource_deadline_s,
            wait_for_nodes=not connection.owned,
        )
        pools.create_resource_pool()
        return RayRun(connection, pools, _start(roles, pools, options))
    except BaseException:
        _give_back(connection, pools)
        raise


def _start(
    roles: Mapping[str, ClassWithInitArgs], pools: ResourcePoolManager, options: RayRunOptions
) -> dict[str, RayWorkerGroup]:
    """One group per pool.  The processes of all pools start at the same time; on any error all are ended."""
    hosts: dict[str, RayHosts] = {}
    try:
        for name, pool in pools.resource_pools.items():
            hosts[name] = RayHosts(pool, _host_options(pools.roles_of(name), options))
        groups = {}
        for name, pool in pools.resource_pools.items():
            colocated = create_colocated_worker_cls({role: roles[role] for role in pools.roles_of(name)})
            groups[name] = RayWorkerGroup(pool, colocated, hosts=hosts[name], observers=options.observers)
    except BaseException:
        for started in hosts.values():
            started.note_failure()
            started.close()
        raise
    return groups


def _host_options(roles: list[str], options: RayRunOptions) -> HostOptions:
    return HostOptions(
        name="+".join(roles),
        device=options.device,
        worker_env=options.worker_env,
        log_dir=options.log_dir,
        plugins=options.plugins,
        start_deadline_s=options.start_deadline_s,
    )


def _give_back(connection: Connection, pools: ResourcePoolManager | None) -> None:
    try:
        if pools is not None and not connection.owned:  # the places of a cluster of our own end with it
            pools.release()
    finally:
        connection.close()
