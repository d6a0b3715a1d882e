"""The Ray backend: the only place of rlhub that imports Ray.

cluster.py      starts or joins a cluster          nodes.py      finds its head, checks that it answers, lists its nodes
pool.py         gives each rank of a resource pool a bundle of a node
process.py      the Ray actor of one rank, and how a process becomes a rank
processes.py    the processes of a pool from creation to their end
group.py        worker groups over them, and a run: cluster, pools, processes, groups
pending.py      their pending calls: deadlines, typed errors, futures
async_actor.py  asynchronous actors, many of whose calls travel in few Ray calls
watch.py        notices that the cluster is lost   reaper.py, orphans.py    end what a run, or a killed driver, left behind
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
