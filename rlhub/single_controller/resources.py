"""The options of a run or an actor before any process exists: ranks, nodes, devices and deadlines, in plain values.

The backends turn these into processes: `launch` takes LaunchOptions, `start_async_actor` AsyncActorOptions, and a ResourcePool
says how many ranks live on which nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhub.config.sections.trainer import DeadlineConfig
from rlhub.errors import ConfigError
from rlhub.registry import suggest
from rlhub.single_controller.calls import CallObserver

Backend = Literal["ray", "local"]

MAIN_POOL = "main"
"""The pool of roles that `placement` does not name."""


@dataclass(slots=True, kw_only=True)
class LaunchOptions:
    """The options with which the workers of a run are started.

    backend: "replicated" is that of a process that has joined a World, where every rank runs the control program.
    nnodes, ranks_per_node: the main pool, which has one process per rank for all roles that `placement` does not name.
    pools, placement: further pools by name with their ranks per node, and role -> pool for roles that live there.  Each pool
    has processes of its own, one per rank, and a rendezvous of its own; roles of one pool share its processes.
    ray_init: keywords of ray.init; an `address` (or the RAY_ADDRESS variable) joins a cluster, otherwise one is started here.
    deadline_s: `start` bounds the building of all workers, `resources` the cluster's answer and the granting of the ranks;
    after `cluster` seconds of silence of the cluster's head calls raise ClusterLostError; `shutdown` bounds the end; the others
    bound the calls of methods, by the name that @register gives them.
    log_dir: each worker's output goes to `<role>-rank<r>.log` there; None leaves it to the backend.
    plugins: modules that every worker imports before it is built.  worker_env: extra variables for the workers.
    """

    backend: Backend | Literal["replicated"] = "ray"
    nnodes: int = 1
    ranks_per_node: int = 1
    pools: Mapping[str, Sequence[int]] = field(default_factory=dict)
    placement: Mapping[str, str] = field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    ray_init: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: DeadlineConfig = field(default_factory=DeadlineConfig)
    log_dir: str | Path | None = None
    plugins: Sequence[str] = ()
    worker_env: Mapping[str, str] = field(default_factory=dict)
    observers: Sequence[CallObserver] = ()


@dataclass(slots=True, kw_only=True)
class AsyncActorOptions:
    """The options with which an actor is started.  The local backend uses name, device, plugins and max_concurrency.

    name: its role in errors, and its log file (`<name>.log` in log_dir).
    num_cpus, num_gpus: what it takes of the cluster (of its slot, where it has one).
    devices: its CUDA_VISIBLE_DEVICES, to share GPUs that others have reserved; "" means those that Ray gave it.
    worker_env: added to its process.  plugins: modules imported before it is built.
    max_concurrency: calls that run at the same time; further ones wait in the actor.
    start_deadline_s: from creation until the object is built.
    slot: a place of a RayResourcePool (`pool.slots()[rank]`) to live in.  node_id: without a slot, the node to live on.
    observers: learn what its calls carry between the processes, see CallObserver.on_transfer.
    """

    name: str
    device: str = "cpu"
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    devices: str = ""
    worker_env: dict[str, str] = field(default_factory=dict)
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()
    max_concurrency: int = 1024
    start_deadline_s: float = 1800.0
    slot: Any = None
    node_id: str = ""
    observers: Sequence[CallObserver] = ()


class ResourcePool:
    """A number of ranks on each of several nodes.

    process_on_nodes: number of ranks on each node, nodes may differ; ranks are numbered node by node.


    max_colocate_count: how many worker groups may share one rank's device as separate processes.
    """

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 1) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1:
            raise ConfigError(f"a resource pool needs at least one process on every node, got {list(process_on_nodes)}")
        if max_colocate_count < 1:
            raise ConfigError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.process_on_nodes = list(process_on_nodes)
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def local_ranks(self) -> list[int]:
        """Returns, per rank, its number on its node."""
        return [local for count in self.process_on_nodes for local in range(count)]

    def local_world_sizes(self) -> list[int]:
        """Returns, per rank, how many ranks its node has."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    def __add__(self, other: ResourcePool) -> ResourcePool:
        count = max(self.max_colocate_count, other.max_colocate_count)
        return ResourcePool(self.process_on_nodes + other.process_on_nodes, count)


def check_mapping(spec: Mapping[str, Sequence[int]], mapping: Mapping[str, str]) -> None:
    """Raises ConfigError unless every role maps to a pool that exists."""
    problems = [
        f"role {role!r} is mapped to pool {pool!r}{suggest(pool, spec)} pools: {', '.join(spec) or 'none'}"
        for role, pool in mapping.items()
        if pool not in spec
    ]
    if problems:
        raise ConfigError(problems)
