"""One driver, many workers: dispatch by decorator, worker groups, pools, and the two backends (Ray and in process).

After the single-controller idea of HybridFlow (Sheng et al., arXiv:2409.19256).  Nothing here imports Ray; `ray/` does.
"""

from rlhub.single_controller.actor_runner import ActorTaskRunner
from rlhub.single_controller.async_actor import AsyncActor, AsyncActorOptions, astart_async_actor, start_async_actor
from rlhub.single_controller.calls import CallFuture, wait_all
from rlhub.single_controller.colocate import create_colocated_worker_cls
from rlhub.single_controller.decorator import (
    Dispatch,
    DispatchMode,
    Execute,
    Mesh,
    get_dispatch_mode,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from rlhub.single_controller.dispatch import make_nd_compute_dataproto_dispatch_fn
from rlhub.single_controller.launch import Launched, launch
from rlhub.single_controller.observer import Call, CallObserver, WorkerInfo
from rlhub.single_controller.resource_pool import ResourcePool
from rlhub.single_controller.worker import ClassWithInitArgs, Worker, WorkerContext
from rlhub.single_controller.worker_group import WorkerGroup

__all__ = [
    "ActorTaskRunner",
    "AsyncActor",
    "AsyncActorOptions",
    "Call",
    "CallFuture",
    "CallObserver",
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "Launched",
    "Mesh",
    "ResourcePool",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "WorkerInfo",
    "astart_async_actor",
    "create_colocated_worker_cls",
    "get_dispatch_mode",
    "launch",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "start_async_actor",
    "update_dispatch_mode",
    "wait_all",
]
