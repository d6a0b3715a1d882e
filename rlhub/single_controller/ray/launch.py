"""Starts a run on Ray: cluster, pools, one process per rank of each pool with the pool's roles in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from rlhub.single_controller.ray.cluster import Connection, connect
from rlhub.single_controller.ray.group import RayWorkerGroup
from rlhub.single_controller.ray.pool import ResourcePoolManager
from rlhub.single_controller.ray.processes import ProcessOptions, RayProcesses
from rlhub.single_controller.resources import MAIN_POOL, LaunchOptions
from rlhub.single_controller.worker import ClassWithInitArgs, check_worker_env, create_colocated_worker_cls
from rlhub.single_controller.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

SHORTEST_CLOSE_S = 5.0
"""A pool gets at least so long to end, however long the others took."""


class RayRun:
    """A running set of worker groups by role.  fused: by pool, all roles of its processes."""

    def __init__(self, connection: Connection, pools: ResourcePoolManager, fused: Mapping[str, RayWorkerGroup]) -> None:
        self._connection = connection
        self._pools = pools
        self._fused = dict(fused)
        spawned = {pool: group.spawn(pools.roles_of(pool)) for pool, group in self._fused.items()}
        self.groups: dict[str, WorkerGroup] = {role: spawned[pool][role] for role, pool in pools.mapping.items()}

    def close(self, deadline_s: float) -> None:
        """Ends the processes, gives the places back, and stops the cluster if this run started it.

        A pool with a dead or hanging rank is ended first: what waits for it in other pools then fails and can close.
        """
        deadline = time.monotonic() + deadline_s
        try:
            for group in sorted(self._fused.values(), key=lambda group: not group.failed):
                group.close(max(SHORTEST_CLOSE_S, deadline - time.monotonic()))
        finally:
            _give_back(self._connection, self._pools)


def launch_ray(roles: Mapping[str, ClassWithInitArgs], options: LaunchOptions) -> RayRun:
    """See `rlhub.single_controller.launch.launch`."""
    check_worker_env(options.worker_env)
    mapping = {role: options.placement.get(role, MAIN_POOL) for role in roles}
    asked = {MAIN_POOL: [options.ranks_per_node] * options.nnodes, **options.pools}
    used = {name: list(counts) for name, counts in asked.items() if name in mapping.values()}
    seconds = options.deadline_s
    connection = connect(
        options.ray_init,
        device=options.device,
        num_ranks=sum(map(sum, used.values())),
        deadline_s=seconds.resources,
        lost_after_s=seconds.cluster,
    )
    pools: ResourcePoolManager | None = None
    try:
        pools = ResourcePoolManager(
            used,
            mapping,
            use_gpu=options.device == "cuda",
            deadline_s=seconds.resources,
            wait_for_nodes=not connection.owned,
        )
        pools.create_resource_pool()
        return RayRun(connection, pools, _start(roles, pools, options))
    except BaseException:
        _give_back(connection, pools)
        raise


def _start(
    roles: Mapping[str, ClassWithInitArgs], pools: ResourcePoolManager, options: LaunchOptions
) -> dict[str, RayWorkerGroup]:
    """Returns one group per pool.  The processes of all pools start at the same time; on any error all are ended."""
    processes: dict[str, RayProcesses] = {}
    try:
        for name, pool in pools.resource_pools.items():
            processes[name] = RayProcesses(pool, _process_options(pools.roles_of(name), options))
        groups = {}
        for name, pool in pools.resource_pools.items():
            colocated = create_colocated_worker_cls({role: roles[role] for role in pools.roles_of(name)})
            groups[name] = RayWorkerGroup(pool, colocated, processes=processes[name], observers=options.observers)
    except BaseException:
        for started in processes.values():
            started.note_failure()
            started.close()
        raise
    return groups


def _process_options(roles: list[str], options: LaunchOptions) -> ProcessOptions:
    return ProcessOptions(
        name="+".join(roles),
        device=options.device,
        worker_env=dict(options.worker_env),
        log_dir=None if options.log_dir is None else str(Path(options.log_dir).absolute()),
        plugins=tuple(options.plugins),
        start_deadline_s=options.deadline_s.start,
    )


def _give_back(connection: Connection, pools: ResourcePoolManager | None) -> None:
    try:
        if pools is not None and not connection.owned:  # the places of a cluster of our own end with it
            pools.release()
    finally:
        connection.close()
