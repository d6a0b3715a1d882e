"""One driver, many workers: the controller writes the control flow and calls methods of worker groups.

After the single-controller idea of HybridFlow (Sheng et al., arXiv:2409.19256).  A call goes

    group.update_actor(batch)        worker_group.py: cut the batch by the method's dispatch mode, send each rank its share
      -> ray/group.py | launch.py      the backend: to the Ray actor of each rank, or into this process
      -> invoke.py                     in the worker's process: run the method, turn its error into a typed one
      -> the worker's method           worker.py: its rank, rendezvous and meshes

and comes back through calls.py as a result, a future or an error that names role, rank and node.

    sampled = group.generate_sequences.retain(key="step 3")(prompts)     the columns of tokens stay with the ranks
    sampled.reorder(order); sampled = actor.exchange(sampled, "actor")   they move once, to the ranks that compute on them
    actor.update_actor(sampled.union(advantages))                        each rank reads its own rows
    critic.receive(sampled.select(names), "critic")                      copies go to a role with processes of its own

decorator.py, dispatch.py   `@register` (where arguments go, who runs, how long it may take) and the built-in dispatch modes
resources.py, launch.py     the options of a run, and `launch`, which starts its workers under Ray or in this process
async_actor.py              objects with `async def` methods in processes of their own, and the task runner over a pool of them
placement.py                the nodes and GPUs of the rollout service's replicas
world.py, replicated.py     the same groups where every rank runs the control flow (trainer.controller=multi): the processes that
                            agree step by step, and calls of which each process runs its own share
ray/                        the Ray backend, and the only place that imports Ray
"""

from rlhub.single_controller.async_actor import ActorTaskRunner, AsyncActor
from rlhub.single_controller.calls import CallFuture, CallObserver, ObservedCall, WorkerInfo, wait_all
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
from rlhub.single_controller.launch import Launched, astart_async_actor, launch, start_async_actor
from rlhub.single_controller.resources import AsyncActorOptions, Backend, LaunchOptions, ResourcePool
from rlhub.single_controller.worker import ClassWithInitArgs, Worker, WorkerContext, create_colocated_worker_cls
from rlhub.single_controller.worker_group import WorkerGroup

__all__ = [
    "ActorTaskRunner",
    "AsyncActor",
    "AsyncActorOptions",
    "Backend",
    "ObservedCall",
    "CallFuture",
    "CallObserver",
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "LaunchOptions",
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
