"""`RayWorkerGroup`: the ranks of one role as Ray actors, and how arguments get to them; `launch_ray`: all roles of a run.

A value that several ranks get (the chunk of a tensor-parallel group, a replicated batch) is stored once and shared; small
values travel inside the call.  A run has one process per rank of each pool, with the pool's roles in it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlhub.errors import DispatchError, ResourceError
from rlhub.single_controller.calls import (
    SHARE_BYTES,
    CallObserver,
    PendingCall,
    RankRequest,
    Request,
    WorkerInfo,
    column_bytes,
    pickled_bytes,
)
from rlhub.single_controller.ray.cluster import Connection, connect
from rlhub.single_controller.ray.pending import Gather, RankOutput
from rlhub.single_controller.ray.pool import RayResourcePool, ResourcePoolManager
from rlhub.single_controller.ray.process import CallHeader
from rlhub.single_controller.ray.processes import ProcessOptions, RayProcesses
from rlhub.single_controller.resources import MAIN_POOL, LaunchOptions
from rlhub.single_controller.worker import ClassWithInitArgs, ColocatedClass, check_worker_env, create_colocated_worker_cls
from rlhub.single_controller.worker_group import WorkerGroup
from rlhub.utils import faults

SHORTEST_CLOSE_S = 5.0
"""A pool gets at least so long to end, however long the others took."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its arguments.  A class that was already decorated with `ray.remote` is taken bare."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(cls, ray.actor.ActorClass):
            # ray.remote derives a class of the same name from the user's; its first base is the one that was decorated.
            cls = cls.__ray_metadata__.modified_class.__mro__[1]  # type: ignore[attr-defined]
        super().__init__(cls, *args, **kwargs)


class RayWorkerGroup(WorkerGroup):
    """One role on every rank of a pool, or several colocated ones (then use `spawn` or `fuse`)."""

    _size_of = staticmethod(pickled_bytes)

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs | ColocatedClass,
        *,
        name_prefix: str = "",
        options: ProcessOptions | None = None,
        processes: RayProcesses | None = None,
        observers: Sequence[CallObserver] = (),
    ) -> None:
        """Starts the processes and builds the roles in them.  processes: those created on the pool; None creates them."""
        roles = _roles_of(ray_cls_with_init, name_prefix)
        single = isinstance(ray_cls_with_init, ClassWithInitArgs)
        super().__init__("+".join(roles), next(iter(roles.values())).cls if single else None, observers)
        settings = options or ProcessOptions()
        if name_prefix or settings.name == "worker":
            settings = replace(settings, name=name_prefix or self.role)
        self._roles = roles
        self._processes = processes or RayProcesses(resource_pool, settings)
        self._processes.start()
        try:
            for role, spec in roles.items():
                self._processes.add_role(role, spec)
        except BaseException:
            self._processes.close()
            raise

    @classmethod
    def _over(
        cls, processes: RayProcesses, roles: Mapping[str, ClassWithInitArgs], observers: Sequence[CallObserver]
    ) -> RayWorkerGroup:
        """Returns a group over processes that exist."""
        group = cls.__new__(cls)
        single = next(iter(roles.values())).cls if len(roles) == 1 else None
        WorkerGroup.__init__(group, "+".join(roles), single, observers)
        group._roles, group._processes = dict(roles), processes
        return group

    @classmethod
    def from_detached(
        cls,
        name_prefix: str,
        world_size: int,
        ray_cls_with_init: ClassWithInitArgs | ColocatedClass,
        *,
        namespace: str | None = None,
        observers: Sequence[CallObserver] = (),
    ) -> RayWorkerGroup:
        """Attaches to the processes that another driver started with `ProcessOptions(name=name_prefix, detached=True)`."""
        try:
            actors = [ray.get_actor(f"{name_prefix}-{rank}", namespace=namespace) for rank in range(world_size)]
        except ValueError as error:
            raise ResourceError(f"no detached worker group {name_prefix!r} of {world_size} ranks: {error}") from error
        processes = RayProcesses.attach(actors, RayResourcePool([world_size]), ProcessOptions(name=name_prefix, detached=True))
        return cls._over(processes, _roles_of(ray_cls_with_init, name_prefix), observers)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._processes.workers

    @property
    def processes(self) -> object:
        return self._processes

    def spawn(self, prefix_set: Collection[str]) -> dict[str, RayWorkerGroup]:
        """Returns one group per role, all over the same processes; closing one ends them all."""
        unknown = sorted(set(prefix_set) - set(self._roles))
        if unknown:
            raise DispatchError(f"no role {unknown[0]!r} in this group; roles: {', '.join(self._roles)}")
        groups = {
            role: self._over(self._processes, {role: spec}, self.observers)
            for role, spec in self._roles.items()
            if role in prefix_set
        }
        for group in groups.values():
            group.deadline_s = self.deadline_s
        return groups

    def fuse(self, prefix_set: Collection[str]) -> None:
        """Offers the roles as attributes of this group: `group.actor.update_actor(batch)`."""
        for role, group in self.spawn(prefix_set).items():
            self.__dict__[role] = group

    @property
    def failed(self) -> bool:
        """Returns whether a rank is known to be dead or hanging."""
        return self._processes.failed

    def close(self, deadline_s: float = 60.0) -> None:
        if not self._closed:
            self._closed = True
            self._processes.close(deadline_s)

    def _send(self, request: Request) -> PendingCall:
        shared = _Shared(request.ranks)
        references: dict[int, Any] = {}
        parts: dict[int, RankOutput] = {}
        for share in request.ranks:
            rank, call = share.rank, self._processes.actors[share.rank].call
            header, values = _header(request, share), shared.values(share)
            if not request.as_data:
                references[rank] = call.remote(header, *values)
                continue
            data, references[rank] = call.options(num_returns=2).remote(header, *values)
            worker = self.workers[rank]
            parts[rank] = RankOutput(role=request.role, method=request.method, worker=worker, data=data, rows=references[rank])
        workers = dict(enumerate(self.workers))
        note_failure = self._processes.note_failure
        return Gather(request.role, request.method, references, workers, request.deadline, note_failure, parts)


def _roles_of(spec: ClassWithInitArgs | ColocatedClass, name: str) -> dict[str, ClassWithInitArgs]:
    return dict(spec.roles) if isinstance(spec, ColocatedClass) else {name or spec.cls.__name__: spec}


def _header(request: Request, rank: RankRequest) -> CallHeader:
    return CallHeader(
        role=request.worker,
        method=request.method,
        keywords=tuple(rank.kwargs),
        materialize=request.materialize,
        as_data=request.as_data,
        reply=rank.reply,
        step=faults.current_step(),
        retain=request.retain,
    )


class _Shared:
    """Replaces large values that more than one rank gets by one stored object."""

    def __init__(self, ranks: Sequence[RankRequest]) -> None:
        self._uses = Counter(id(value) for rank in ranks for value in (*rank.args, *rank.kwargs.values()))
        self._stored: dict[int, Any] = {}

    def values(self, rank: RankRequest) -> list[Any]:
        """Returns the rank's positional values, then those of its keywords."""
        return [self._shared(value) for value in (*rank.args, *rank.kwargs.values())]

    def _shared(self, value: Any) -> Any:
        key = id(value)
        if key not in self._stored and self._uses[key] > 1 and column_bytes(value) >= SHARE_BYTES:
            self._stored[key] = ray.put(value)
        return self._stored.get(key, value)


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
    """Starts all roles of a run; see `rlhub.single_controller.launch.launch`."""
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
        return RayRun(connection, pools, _start_groups(roles, pools, options))
    except BaseException:
        _give_back(connection, pools)
        raise


def _start_groups(
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
