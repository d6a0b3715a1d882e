"""`@register`: how a worker method says where its arguments go, who runs it, how the results come back and how long it may take.

The driver reads these marks off the worker's class and offers the method on the worker group; nothing here runs in the
call path.  A mode is looked up by name when a call is made, so `update_dispatch_mode` also reaches methods that were
registered before.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from rlhub.config.sections.trainer import DeadlineConfig
from rlhub.errors import DispatchError
from rlhub.registry import suggest

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__rlhub_method__"

DEFAULT_DEADLINE = "update"
"""The deadline of methods that name none: none waits for ever."""
_DEADLINES = tuple(field.name for field in fields(DeadlineConfig))


class Execute(enum.Enum):
    """The ranks that run the method."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(slots=True, kw_only=True, frozen=True)
class Mesh:
    """The arrangement of the ranks of a group for one kind of work.

    dp_ranks: per rank, the data-parallel shard it works on (ranks of one tensor- or sequence-parallel group share one).
    collecting: the ranks whose results are kept, one per shard, in shard order.
    """

    name: str
    dp_ranks: tuple[int, ...]
    collecting: tuple[int, ...]

    @property
    def dp_size(self) -> int:
        return len(self.collecting)

    @property
    def copies(self) -> dict[int, int]:
        """Returns for each rank that does not collect the one that collects for its shard: both work on the same rows."""
        homes = ((rank, self.collecting[dp]) for rank, dp in enumerate(self.dp_ranks))
        return {rank: home for rank, home in homes if rank != home}


class DispatchTarget(Protocol):
    """The part of a worker group that dispatch and collect functions use."""

    @property
    def role(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> Mesh:
        """Returns the arrangement that the workers declared under `name`; queried once, then cached."""
        ...


DispatchFn = Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
"""`dispatch_fn(group, *args, **kwargs) -> (args, kwargs)` where every value became a list with one item per rank."""

CollectFn = Callable[[Any, list[Any]], Any]
"""`collect_fn(group, outputs) -> result`, outputs in rank order (or in the order of `DispatchMode.ranks_fn`)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DispatchMode:
    """One row of the dispatch table.

    ranks_fn: ranks whose outputs are collected, in that order; None means all.  Other ranks run but send nothing back.
    proto: outputs are DataProto, so a non-blocking call gives one DataProtoFuture over them.
    rank_zero: arguments go to rank 0 as they are, and its single output is the result.
    callable: False for methods that the driver must not call.
    mesh: the arrangement of ranks by which batches are cut; "" where every rank has a part of its own.
    """

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    ranks_fn: Callable[[Any], Sequence[int]] | None = None
    proto: bool = False
    rank_zero: bool = False
    callable: bool = True
    mesh: str = ""


_MODES: dict[str, DispatchMode] = {}


class _DispatchNames(type):
    """Lets `Dispatch.NAME` also find modes that were registered later."""

    def __getattr__(cls, name: str) -> str:
        if name in _MODES:
            return name
        raise AttributeError(f"no dispatch mode {name!r}{suggest(name, _MODES)} known: {', '.join(sorted(_MODES))}")

    def __iter__(cls) -> Any:
        return iter(sorted(_MODES))


class Dispatch(metaclass=_DispatchNames):
    """Names of the dispatch modes; `register_dispatch_mode` adds to them."""

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    DIRECT_ROLLOUT_METHOD = "DIRECT_ROLLOUT_METHOD"


ModeLike = str | DispatchMode | Mapping[str, Callable[..., Any]]


def register_dispatch_mode(name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Adds a mode under a new name; afterwards `Dispatch.<name>` and the plain string both denote it."""
    if name in _MODES:
        raise DispatchError(f"dispatch mode {name!r} exists already; use update_dispatch_mode to replace it")
    _MODES[name] = DispatchMode(name=name, dispatch_fn=dispatch_fn, collect_fn=collect_fn)


def update_dispatch_mode(name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Replaces an existing mode; methods registered with it before use the new functions from now on."""
    get_dispatch_mode(name)
    _MODES[name] = DispatchMode(name=name, dispatch_fn=dispatch_fn, collect_fn=collect_fn)


def add_dispatch_mode(mode: DispatchMode) -> None:
    """Puts a complete row into the table (used by the built-in modes)."""
    _MODES[mode.name] = mode


def get_dispatch_mode(mode: ModeLike) -> DispatchMode:
    """Returns the row that `mode` denotes: a name, a row itself, or a dict of `dispatch_fn` and `collect_fn`."""
    if isinstance(mode, DispatchMode):
        return mode
    if isinstance(mode, Mapping):
        if set(mode) != {"dispatch_fn", "collect_fn"}:
            raise DispatchError(f"a dispatch mode given as a dict needs exactly dispatch_fn and collect_fn, got {sorted(mode)}")
        return DispatchMode(name="custom", dispatch_fn=mode["dispatch_fn"], collect_fn=mode["collect_fn"])
    if mode not in _MODES:
        raise DispatchError(f"no dispatch mode {mode!r}{suggest(str(mode), _MODES)} known: {', '.join(sorted(_MODES))}")
    return _MODES[mode]


@dataclass(slots=True, kw_only=True, frozen=True)
class MethodSpec:
    """The settings of `@register` for one method."""

    dispatch_mode: ModeLike
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    deadline: str
    adds_columns: bool

    @property
    def mode(self) -> DispatchMode:
        return get_dispatch_mode(self.dispatch_mode)

    @property
    def rank_zero(self) -> bool:
        return self.execute_mode is Execute.RANK_ZERO or self.mode.rank_zero


def register(
    dispatch_mode: ModeLike = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    deadline: str = DEFAULT_DEADLINE,
    adds_columns: bool = False,
) -> Callable[[F], F]:
    """Makes a worker method (sync or `async def`) callable on the worker group.

    blocking: False returns a future at once (a DataProtoFuture where the mode collects DataProto).
    materialize_futures: DataProtoFuture arguments are fetched in the worker before the method sees them.
    deadline: which field of trainer.deadline_s is the longest wait of the driver for a call.
    adds_columns: the method returns further columns of its batch.  Called with a BatchRef, it leaves those of more than one
        number a row with the ranks, and a BatchRef comes back.
    """
    if deadline not in _DEADLINES:
        raise DispatchError(f"no deadline {deadline!r}{suggest(deadline, _DEADLINES)} known: {', '.join(_DEADLINES)}")
    if isinstance(dispatch_mode, Mapping):
        dispatch_mode = get_dispatch_mode(dispatch_mode)
    spec = MethodSpec(
        dispatch_mode=dispatch_mode,
        execute_mode=execute_mode,
        blocking=blocking,
        materialize_futures=materialize_futures,
        deadline=deadline,
        adds_columns=adds_columns,
    )

    def mark(method: F) -> F:
        method.__dict__[_MARK] = spec
        return method

    return mark


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Returns the registered methods of a worker class by name.  An override keeps the mark of the method it overrides."""
    found: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if inspect.isfunction(value) and _MARK in vars(value):
                found[name] = vars(value)[_MARK]
    return found
