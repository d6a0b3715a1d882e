"""`WorkerGroup`: the driver's handle on all ranks of one role.

Every `@register`ed method of the worker class is offered on the group: its dispatch mode turns the arguments into one list
per rank, the backend runs the ranks, and the mode joins the results.  Backends implement `_send` and `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhub.errors import DispatchError
from rlhub.registry import suggest
from rlhub.single_controller.calls import CallFuture, PendingCall, RankRequest, Request, Watch
from rlhub.single_controller.decorator import DispatchMode, Mesh, MethodSpec, registered_methods
from rlhub.single_controller.observer import Call, CallObserver, WorkerInfo
from rlhub.single_controller.worker import MeshInfo


class GroupMethod:
    """One registered method on one group.  Calling it runs the method; `submit` returns a future whatever `blocking` says."""

    __slots__ = ("_group", "_spec", "name")

    def __init__(self, group: WorkerGroup, name: str, spec: MethodSpec) -> None:
        self._group = group
        self._spec = spec
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._send(args, kwargs, as_future=False) if self._spec.blocking else self.submit(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Send the call and return its future: a DataProtoFuture where the mode collects DataProto, else a CallFuture."""
        return self._send(args, kwargs, as_future=True)

    def _send(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, as_future: bool) -> Any:
        group, mode, finish = self._group, self._spec.mode, _only
        as_data = as_future and mode.proto and not self._spec.rank_zero
        if self._spec.rank_zero:
            collected: Sequence[int] = (0,)
            requests = [_rank_zero_request(mode, group, args, kwargs)]
        else:
            collected = range(group.world_size) if mode.ranks_fn is None else mode.ranks_fn(group)
            requests = _per_rank(group, mode.name, *mode.dispatch_fn(group, *args, **kwargs))

            def finish(outputs: dict[int, Any]) -> Any:
                return mode.collect_fn(group, [outputs[rank] for rank in collected])

        for request in requests:
            request.reply = request.rank in collected
        future = group._start(
            self.name, requests, finish, blocking=not as_future, materialize=self._spec.materialize_futures, as_data=as_data
        )
        if as_data:
            return future.as_data(collected)
        return future if as_future else future.get()


def _only(outputs: dict[int, Any]) -> Any:
    return outputs[0]


def _rank_zero_request(mode: DispatchMode, group: WorkerGroup, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RankRequest:
    """Rank 0 gets the arguments as they are; a mode that may not be called still refuses."""
    if not mode.callable:
        mode.dispatch_fn(group, *args, **kwargs)
    return RankRequest(rank=0, args=tuple(args), kwargs=dict(kwargs))


def _per_rank(group: WorkerGroup, mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[RankRequest]:
    """Cut the columns that a dispatch function made into one request per rank."""
    columns = [(f"argument {i}", column) for i, column in enumerate(args)] + list(kwargs.items())
    for name, column in columns:
        if not isinstance(column, list | tuple) or len(column) != group.world_size:
            raise DispatchError(
                f"the dispatch function of mode {mode} must turn {name} into a list with one item per rank "
                f"({group.world_size}), got {type(column).__name__}"
            )
    return [
        RankRequest(rank=rank, args=tuple(column[rank] for column in args), kwargs={k: v[rank] for k, v in kwargs.items()})
        for rank in range(group.world_size)
    ]


class WorkerGroup(ABC):
    """See the module docstring.  role: the name in errors, logs and observers; worker_cls: None for a group without methods
    of its own (colocated roles before `spawn`)."""

    def __init__(self, role: str, worker_cls: type | None, observers: Sequence[CallObserver] = ()) -> None:
        self.role = role
        self.observers: list[CallObserver] = list(observers)
        self._deadlines: dict[str, float] = {}
        self._default_deadline: float | None = None
        self._meshes: dict[str, Mesh] = {}
        self._methods: dict[str, GroupMethod] = {}
        self._closed = False
        for name, spec in ({} if worker_cls is None else registered_methods(worker_cls)).items():
            if name in dir(type(self)):
                raise DispatchError(
                    f"{worker_cls and worker_cls.__name__}.{name}: worker groups have a member of this name; rename the method"
                )
            self._methods[name] = GroupMethod(self, name, spec)

    def __getattr__(self, name: str) -> Any:
        methods: dict[str, GroupMethod] = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        raise AttributeError(
            f"worker group {self.__dict__.get('role', '?')!r} has no method {name!r}{suggest(name, methods)} "
            f"registered: {', '.join(sorted(methods)) or 'none'}; mark worker methods with @register"
        )

    # -- what backends provide ---------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def workers(self) -> tuple[WorkerInfo, ...]:
        """Where each rank lives, in rank order."""

    @abstractmethod
    def _send(self, request: Request) -> PendingCall:
        """Send to the ranks named in the request; returns at once (in process: when the method is done)."""

    @abstractmethod
    def close(self, deadline_s: float = 60.0) -> None:
        """End the processes of this group (and of roles that share them).  Never raises for workers that are dead."""

    # -- calls -------------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def set_deadlines(self, seconds: Mapping[str, float], default: float | None = None) -> None:
        """Longest wait per method name, in seconds; `default` is for all others (None: no limit)."""
        unknown = sorted(set(seconds) - set(self._methods))
        if unknown:
            raise DispatchError(
                f"{self.role} has no registered method {unknown[0]!r}{suggest(unknown[0], self._methods)} to set a deadline for"
            )
        self._deadlines.update(seconds)
        self._default_deadline = default

    def deadline(self, method: str) -> float | None:
        """The deadline of a method in seconds, None for no limit."""
        return self._deadlines.get(method, self._default_deadline)

    def methods(self) -> Iterable[str]:
        return sorted(self._methods)

    def _start(
        self,
        method: str,
        requests: list[RankRequest],
        finish: Callable[[dict[int, Any]], Any],
        *,
        blocking: bool,
        materialize: bool = True,
        as_data: bool = False,
    ) -> CallFuture:
        if self._closed:
            raise DispatchError(f"{self.role}.{method}: this worker group was closed")
        workers = self.workers
        call = Call(role=self.role, method=method, blocking=blocking, workers=tuple(workers[r.rank] for r in requests))
        request = Request(
            role=self.role,
            method=method,
            ranks=requests,
            materialize=materialize,
            as_data=as_data,
            deadline_s=self.deadline(method),
        )
        watch = Watch(call, self.observers)
        try:
            return CallFuture(self._send(request), finish, watch)
        except BaseException as error:
            watch.end(error)
            raise

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> CallFuture:
        """Run any method of the worker, registered or not, on all ranks with the same arguments (lists stay whole)."""
        ranks = [RankRequest(rank=rank, args=args, kwargs=dict(kwargs)) for rank in range(self.world_size)]
        return self._start(method_name, ranks, lambda outputs: [outputs[rank] for rank in sorted(outputs)], blocking=False)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As `execute_all_async`, waiting: one output per rank."""
        outputs: list[Any] = self.execute_all_async(method_name, *args, **kwargs).get()
        return outputs

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> CallFuture:
        """Run any method of the worker on rank 0 only."""
        return self._start(method_name, [RankRequest(rank=0, args=args, kwargs=dict(kwargs))], _only, blocking=False)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """As `execute_rank_zero_async`, waiting."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def mesh(self, name: str) -> Mesh:
        """The arrangement that the workers declared under `name`; asked for on first use, then cached."""
        if name not in self._meshes:
            self._meshes[name] = build_mesh(self.role, name, self.execute_all_sync("query_mesh", name))
        return self._meshes[name]


def build_mesh(role: str, name: str, infos: Sequence[MeshInfo | tuple[str, ...]]) -> Mesh:
    """Check the ranks' declarations and put them together; every shard needs exactly one collecting rank."""
    declared = [info for info in infos if isinstance(info, MeshInfo)]
    if len(declared) != len(infos):
        missing = [rank for rank, info in enumerate(infos) if not isinstance(info, MeshInfo)]
        known = sorted({known for info in infos if isinstance(info, tuple) for known in info})
        raise DispatchError(
            f"{role}: rank {missing[0]} declared no mesh {name!r} (it knows: {', '.join(known) or 'none'}); every rank calls "
            "_register_dispatch_collect_info before the first call that uses the mesh"
        )
    dp_size = max(info.dp_rank for info in declared) + 1
    collecting = [[rank for rank, info in enumerate(declared) if info.is_collect and info.dp_rank == dp] for dp in range(dp_size)]
    for dp, ranks in enumerate(collecting):
        if len(ranks) != 1:
            raise DispatchError(f"{role}: shard {dp} of mesh {name!r} needs exactly one collecting rank, has {ranks}")
    return Mesh(name=name, dp_ranks=tuple(info.dp_rank for info in declared), collecting=tuple(ranks[0] for ranks in collecting))
