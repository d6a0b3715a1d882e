"""The Ray backend: the only place of rlhub that imports Ray.

cluster.py      starts or joins a cluster          nodes.py      where its head is, whether it answers, what its nodes have
pool.py         which bundle of which node each rank of a resource pool runs in
process.py      the Ray actor of one rank, and how a process becomes a rank
processes.py    the processes of a pool from creation to their end
group.py        worker groups over them, and a run: cluster, pools, processes, groups
pending.py      their pending calls: deadlines, typed errors, futures
async_actor.py  asynchronous actors                exchange.py   many small calls carried by few Ray calls
watch.py        is the cluster lost?               reaper.py, orphans.py    end what a run, or a killed driver, left behind
"""

from rlhub.single_controller.ray.cluster import Connection, build_runtime_env, connect
from rlhub.single_controller.ray.group import RayClassWithInitArgs, RayWorkerGroup
from rlhub.single_controller.ray.pool import (
    RayResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from rlhub.single_controller.ray.processes import ProcessOptions
from rlhub.single_controller.worker import create_colocated_worker_cls

__all__ = [
    "Connection",
    "ProcessOptions",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "build_runtime_env",
    "connect",
    "create_colocated_worker_cls",
    "merge_resource_pool",
    "split_resource_pool",
]
