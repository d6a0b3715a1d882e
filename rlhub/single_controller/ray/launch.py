"""Start a run on Ray: cluster, pool, one process per rank with all roles in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhub.single_controller.colocate import create_colocated_worker_cls
from rlhub.single_controller.observer import CallObserver
from rlhub.single_controller.ray.cluster import Connection, connect
from rlhub.single_controller.ray.group import RayWorkerGroup
from rlhub.single_controller.ray.hosts import HostOptions
from rlhub.single_controller.ray.pool import ResourcePoolManager
from rlhub.single_controller.worker import ClassWithInitArgs, check_worker_env
from rlhub.single_controller.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

_POOL = "global"


@dataclass(slots=True, kw_only=True)
class RayRunOptions:
    """See `rlhub.single_controller.launch.launch`."""

    process_on_nodes: list[int]
    device: str = "cpu"
    ray_init: dict[str, Any] = field(default_factory=dict)
    start_deadline_s: float = 1800.0
    resource_deadline_s: float = 120.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()
    worker_env: dict[str, str] = field(default_factory=dict)
    observers: tuple[CallObserver, ...] = ()


class RayRun:
    """A running set of worker groups by role."""

    def __init__(self, connection: Connection, pools: ResourcePoolManager, fused: RayWorkerGroup) -> None:
        self._connection = connection
        self._pools = pools
        self._fused = fused
        self.groups: dict[str, WorkerGroup] = dict(fused.spawn(pools.mapping))

    def close(self, deadline_s: float) -> None:
        """End the processes, give the places back, and stop the cluster if this run started it."""
        try:
            self._fused.close(deadline_s)
        finally:
            _give_back(self._connection, self._pools)


def launch_ray(roles: Mapping[str, ClassWithInitArgs], options: RayRunOptions) -> RayRun:
    """See `rlhub.single_controller.launch.launch`."""
    check_worker_env(options.worker_env)
    connection = connect(options.ray_init, device=options.device, num_ranks=sum(options.process_on_nodes))
    pools = ResourcePoolManager(
        {_POOL: options.process_on_nodes},
        dict.fromkeys(roles, _POOL),
        use_gpu=options.device == "cuda",
        deadline_s=options.resource_deadline_s,
        wait_for_nodes=not connection.owned,
    )
    try:
        pools.create_resource_pool()
        colocated = create_colocated_worker_cls({role: roles[role] for role in pools.roles_of(_POOL)})
        settings = HostOptions(
            name="+".join(colocated.roles),
            device=options.device,
            worker_env=options.worker_env,
            log_dir=options.log_dir,
            plugins=options.plugins,
            start_deadline_s=options.start_deadline_s,
        )
        fused = RayWorkerGroup(pools.resource_pools[_POOL], colocated, options=settings, observers=options.observers)
    except BaseException:
        _give_back(connection, pools)
        raise
    return RayRun(connection, pools, fused)


def _give_back(connection: Connection, pools: ResourcePoolManager) -> None:
    pools.release()
    connection.close()
