"""The Ray backend: the only place of rlhub that imports Ray."""

from rlhub.single_controller.colocate import create_colocated_worker_cls
from rlhub.single_controller.ray.cluster import Connection, connect
from rlhub.single_controller.ray.group import RayClassWithInitArgs, RayWorkerGroup
from rlhub.single_controller.ray.hosts import HostOptions
from rlhub.single_controller.ray.pool import (
    RayResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from rlhub.single_controller.ray.runtime_env import build_runtime_env

__all__ = [
    "Connection",
    "HostOptions",
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
