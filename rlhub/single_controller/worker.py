"""`Worker`: base of everything that runs on a rank, and `ClassWithInitArgs`, a worker that is yet to be built.

A worker learns its place (rank, world size, rendezvous) from a `WorkerContext` that its process sets around construction, so
subclasses need not pass it on, and the same class runs under Ray, in process and bare in a unit test.  Several roles may be
colocated in one process per rank: they share the device, and a call to one waits for the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

from rlhub.errors import ConfigError, DispatchError
from rlhub.utils.user_code import absolute, load_target

_ENV_FIELDS = {
    "WORLD_SIZE": "world_size",
    "RANK": "rank",
    "LOCAL_WORLD_SIZE": "local_world_size",
    "LOCAL_RANK": "local_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
}
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
RESERVED_ENV = frozenset(_ENV_FIELDS) | {VISIBLE_DEVICES}


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerContext:
    """A worker's place in its group.

    device: "cuda" or "cpu"; with "cuda" the process sees all the job's GPUs of its node and uses number `local_rank`.
    master_addr, master_port: rendezvous of the group's process group, on rank 0's node.
    """

    role: str = "worker"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = "127.0.0.1"
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"

    def env(self) -> dict[str, str]:
        """Returns the environment variables that torch.distributed and the engines read."""
        return {
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def check_worker_env(worker_env: Mapping[str, str]) -> None:
    """Raises ConfigError (a ValueError) when a user's variables would override the ones that define the rank."""
    taken = sorted(set(worker_env) & RESERVED_ENV)
    if taken:
        raise ConfigError(f"worker_env may add variables but not override {', '.join(taken)}: rlhub sets these for every rank")


_current: ContextVar[WorkerContext | None] = ContextVar("rlhub_worker_context", default=None)


@contextmanager
def worker_context(context: WorkerContext) -> Iterator[None]:
    """Workers constructed inside belong to `context`."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(slots=True, kw_only=True, frozen=True)
class MeshInfo:
    """One rank's declaration for one mesh."""

    dp_rank: int
    is_collect: bool


class Worker:
    """The base class of all workers.  Methods marked with `@register` can be called through the worker group.

    `self.context`, `self.closing` and the mesh table exist before `__init__` runs, whether or not a subclass calls
    `super().__init__()`.
    """

    context: WorkerContext
    closing: ExitStack
    """The resources that `close` releases, the last first: code registers the release of each here as soon as it exists."""
    _meshes: dict[str, MeshInfo]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker.context = _current.get() or WorkerContext()
        worker.closing = ExitStack()
        worker._meshes = {}
        return worker

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def local_rank(self) -> int:
        return self.context.local_rank

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Declares this rank's data-parallel shard in mesh `mesh_name`, and whether its results are the shard's.

        To be called on every rank before the first call that uses the mesh (the driver asks once and caches).
        """
        self._meshes[mesh_name] = MeshInfo(dp_rank=dp_rank, is_collect=is_collect)

    def query_mesh(self, mesh_name: str) -> MeshInfo | tuple[str, ...]:
        """Returns this rank's declaration for a mesh, or the names it knows when there is none."""
        return self._meshes.get(mesh_name) or tuple(sorted(self._meshes))

    def close(self) -> None:
        """Releases what must not outlive the process (children, servers).  Runs once on an orderly shutdown, also where not all
        was built."""
        self.closing.close()


class ClassWithInitArgs:
    """A worker class with the arguments it will be constructed with, on every rank.

    cls: the class, or for one of a user's file, whose module other processes do not know, "path.py:Class".
    """

    def __init__(self, cls: type | str, *args: Any, **kwargs: Any) -> None:
        self._cls = absolute(cls) if isinstance(cls, str) else cls
        self.args = args
        self.kwargs = kwargs

    @property
    def cls(self) -> type:
        """Returns the class.  Raises LoadError where a user's cannot be loaded."""
        loaded: type = load_target(self._cls) if isinstance(self._cls, str) else self._cls
        return loaded

    def build(self, context: WorkerContext) -> Any:
        """Constructs the worker in its place."""
        with worker_context(context):
            return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


class ColocatedClass:
    """Worker classes with their arguments by role, all to live in the same process on every rank."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs]) -> None:
        if not roles:
            raise DispatchError("no roles to colocate: give at least one {role: ClassWithInitArgs}")
        self.roles = dict(roles)

    def __repr__(self) -> str:
        return f"ColocatedClass({', '.join(self.roles)})"


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClass:
    """Joins roles for one worker group; `group.spawn(set_of_roles)` then gives one group per role over the same processes."""
    return ColocatedClass(class_dict)


@contextmanager
def applied_env(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables and restores the old values on exit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
