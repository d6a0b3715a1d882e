"""`RayWorkerGroup`: the ranks of one role as Ray actors, and how arguments get to them.

A value that several ranks get (the chunk of a tensor-parallel group, a replicated batch) is stored once and shared; small
values travel inside the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from rlhub.errors import DispatchError, ResourceError
from rlhub.protocol import DataProto
from rlhub.single_controller.calls import CallObserver, PendingCall, RankRequest, Request, WorkerInfo
from rlhub.single_controller.ray.pending import Gather, Part
from rlhub.single_controller.ray.pool import RayResourcePool
from rlhub.single_controller.ray.process import CallHeader
from rlhub.single_controller.ray.processes import ProcessOptions, RayProcesses
from rlhub.single_controller.worker import ClassWithInitArgs, ColocatedClass
from rlhub.single_controller.worker_group import WorkerGroup
from rlhub.utils import faults

SHARE_BYTES = 32 * 1024
"""Values at least this large are stored once when several ranks get them; smaller ones cost less inside the call."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its arguments.  A class that was already decorated with `ray.remote` is taken bare."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(cls, ray.actor.ActorClass):
            # ray.remote derives a class of the same name from the user's; its first base is the one that was decorated.
            cls = cls.__ray_metadata__.modified_class.__mro__[1]  # type: ignore[attr-defined]
        super().__init__(cls, *args, **kwargs)


class RayWorkerGroup(WorkerGroup):
    """One role on every rank of a pool, or several colocated ones (then use `spawn` or `fuse`)."""

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
        """processes: those on the pool that were asked for and not started yet; None asks for them here."""
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
        """Whether a rank is known to be dead or hanging."""
        return self._processes.failed

    def close(self, deadline_s: float = 60.0) -> None:
        if not self._closed:
            self._closed = True
            self._processes.close(deadline_s)

    def _send(self, request: Request) -> PendingCall:
        shared = _Shared(request.ranks)
        references: dict[int, Any] = {}
        parts: dict[int, Part] = {}
        for share in request.ranks:
            rank, call = share.rank, self._processes.actors[share.rank].call
            header, values = _header(request, share), shared.values(share)
            if not request.as_data:
                references[rank] = call.remote(header, *values)
                continue
            data, references[rank] = call.options(num_returns=2).remote(header, *values)
            worker = self.workers[rank]
            parts[rank] = Part(role=request.role, method=request.method, worker=worker, data=data, rows=references[rank])
        workers = dict(enumerate(self.workers))
        note_failure = self._processes.note_failure
        return Gather(request.role, request.method, references, workers, request.deadline, note_failure, parts)


def _roles_of(spec: ClassWithInitArgs | ColocatedClass, name: str) -> dict[str, ClassWithInitArgs]:
    return dict(spec.roles) if isinstance(spec, ColocatedClass) else {name or spec.cls.__name__: spec}


def _header(request: Request, rank: RankRequest) -> CallHeader:
    return CallHeader(
        role=request.role,
        method=request.method,
        keywords=tuple(rank.kwargs),
        materialize=request.materialize,
        as_data=request.as_data,
        reply=rank.reply,
        step=faults.current_step(),
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
        if key not in self._stored and self._uses[key] > 1 and approximate_bytes(value) >= SHARE_BYTES:
            self._stored[key] = ray.put(value)
        return self._stored.get(key, value)


def approximate_bytes(value: Any) -> int:
    """Returns the size of the arrays and strings in a value, down to containers of containers; other objects count nothing."""
    if isinstance(value, DataProto):
        return approximate_bytes(value.non_tensor_batch) + approximate_bytes(value.tensors())
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(approximate_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(approximate_bytes, value))
    return 0
