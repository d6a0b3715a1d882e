"""`WorkerGroup`: the driver's handle on all ranks of one role.

Every `@register`ed method of the worker class is offered on the group: its dispatch mode turns the arguments into one list
per rank, the backend runs the ranks, and the mode joins the results.  Backends implement `_send` and `close`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhub.config.sections.trainer import DeadlineConfig
from rlhub.errors import DispatchError, HolderLostError
from rlhub.protocol import Batch, BatchRef, DataProto, Retain
from rlhub.protocol.columns import chunk_bounds, num_bytes
from rlhub.protocol.exchange import RowSource, plan_exchange, plan_transfer
from rlhub.protocol.layout import ColumnInfo, Layout
from rlhub.registry import suggest
from rlhub.single_controller.calls import (
    CallFuture,
    CallObserver,
    Deadline,
    ObservedCall,
    PendingCall,
    RankRequest,
    Request,
    Watch,
    WorkerInfo,
    column_bytes,
)
from rlhub.single_controller.decorator import DEFAULT_DEADLINE, DispatchMode, Mesh, MethodSpec, registered_methods
from rlhub.single_controller.worker import MeshInfo


class GroupMethod:
    """One registered method on one group.  Calling it runs the method; `blocking` says whether it waits for the result."""

    __slots__ = ("_blocking", "_group", "_retain", "_spec", "deadline", "name")

    def __init__(self, group: WorkerGroup, name: str, spec: MethodSpec, *, blocking: bool, retain: Retain | None = None) -> None:
        self._group = group
        self._spec = spec
        self._blocking = blocking
        self._retain = retain
        self.name = name
        self.deadline = spec.deadline

    @property
    def num_shards(self) -> int:
        """Returns the number of parts into which a call cuts its batch; 1 where it does not."""
        mesh = self._spec.mode.mesh
        return self._group.mesh(mesh).dp_size if mesh else 1

    @property
    def submit(self) -> GroupMethod:
        """Returns the same method as a non-blocking one: a call gives a DataProtoFuture where the mode collects DataProto, else a
        CallFuture."""
        return GroupMethod(self._group, self.name, self._spec, blocking=False, retain=self._retain)

    def retain(self, *names: str, key: str = "") -> GroupMethod:
        """Returns the same method as one whose result is a BatchRef: those columns of it stay with the ranks that made them.

        names: none means every tensor column of more than one number a row.  key: of the batch that the columns begin; "" adds
        them to that of the call's BatchRef argument.
        """
        return GroupMethod(self._group, self.name, self._spec, blocking=self._blocking, retain=Retain(key, names))

    def bring(self, rows: Batch) -> None:
        """Brings rows of other processes to the ranks that this method runs on; nothing where they have them, or rows travel."""
        if isinstance(rows, BatchRef) and self._group._lacks(rows, self._spec.mode):
            self._group.copy_of(rows, self._spec.mode.mesh)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # One frame, and one more for the backend's `_send`: the traceback of a step stays short.
        group, mode, rank_zero = self._group, self._spec.mode, self._spec.rank_zero
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, BatchRef)), None)
        if given is not None and group._lacks(given, mode):
            args = tuple(group.copy_of(value, mode.mesh) if isinstance(value, BatchRef) else value for value in args)
            kwargs = {n: group.copy_of(value, mode.mesh) if isinstance(value, BatchRef) else value for n, value in kwargs.items()}
        ranks, collected = _rank_zero(mode, group, args, kwargs) if rank_zero else _per_rank(mode, group, args, kwargs)
        request = group._request(self.name, ranks)
        request.materialize = self._spec.materialize_futures
        request.retain = _retained_by(self._retain, self._spec, group, self.name, (*args, *kwargs.values()))
        request.as_data = mode.proto and not rank_zero and not self._blocking and request.retain is None
        with group._watch(request, blocking=self._blocking) as watch:
            watch.send(ranks)
            pending = group._send(request)
        if request.as_data:
            return pending.data_future(collected, watch)

        def finish(outputs: dict[int, Any]) -> Any:
            result = outputs[0] if rank_zero else mode.collect_fn(group, [outputs[rank] for rank in collected])
            if isinstance(result, BatchRef):
                result.group = group
                if given is not None and group._lacks(given, mode):
                    return group._give_back(result, given)
            return result

        future = CallFuture(pending, finish, watch)
        return future.get() if self._blocking else future


def _retained_by(
    retain: Retain | None, spec: MethodSpec, group: WorkerGroup, method: str, values: Iterable[Any]
) -> Retain | None:
    """Returns what a call retains, with its key: what was said, or the columns that a method adds to a batch by reference.

    DispatchError where there is no key.
    """
    rows = next((value for value in values if isinstance(value, BatchRef)), None)
    if retain is None and spec.adds_columns and rows is not None:
        retain = Retain("")
    if retain is None or retain.key:
        return retain
    if rows is None:
        raise DispatchError(
            f"{group.role}.{method}: a result can stay with the ranks under the key of a BatchRef argument, and there is none; "
            "name a new one: retain(..., key=...)"
        )
    return Retain(rows.key, retain.names)


Shares = tuple[list[RankRequest], Sequence[int]]
"""Each rank's share of a call, and the ranks whose outputs are collected, in that order."""


def _rank_zero(mode: DispatchMode, group: WorkerGroup, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shares:
    """Gives rank 0 the arguments as they are; a mode that may not be called still refuses."""
    if not mode.callable:
        mode.dispatch_fn(group, *args, **kwargs)
    return [RankRequest(rank=0, args=tuple(args), kwargs=dict(kwargs))], (0,)


def _per_rank(mode: DispatchMode, group: WorkerGroup, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shares:
    """Cuts the columns that the dispatch function makes into one request per rank."""
    collected = range(group.world_size) if mode.ranks_fn is None else mode.ranks_fn(group)
    columns, named = mode.dispatch_fn(group, *args, **kwargs)
    for name, column in [(f"argument {i}", column) for i, column in enumerate(columns)] + list(named.items()):
        if not isinstance(column, list | tuple) or len(column) != group.world_size:
            raise DispatchError(
                f"the dispatch function of mode {mode.name} must turn {name} into a list with one item per rank "
                f"({group.world_size}), got {type(column).__name__}"
            )
    ranks = [
        RankRequest(
            rank=rank,
            args=tuple(column[rank] for column in columns),
            kwargs={name: column[rank] for name, column in named.items()},
            reply=rank in collected,
        )
        for rank in range(group.world_size)
    ]
    return ranks, collected


class WorkerGroup(ABC):
    """See the module docstring.  role: the name in errors, logs and observers; worker_cls: None for a group without methods
    of its own (colocated roles before `spawn`).  deadline_s: the longest waits, which methods name when they are registered.
    exchanged_bytes, fetched_bytes: what moved between the ranks, and from them to the driver, of batches held by reference.
    """

    _size_of: Callable[[Any], int] = staticmethod(column_bytes)
    """Returns the bytes of an argument or a result on its way."""

    def __init__(self, role: str, worker_cls: type | None, observers: Sequence[CallObserver] = ()) -> None:
        self.role = role
        self.observers: list[CallObserver] = list(observers)
        self.deadline_s = DeadlineConfig()
        self._meshes: dict[str, Mesh] = {}
        self._methods: dict[str, GroupMethod] = {}
        self.exchanged_bytes = self.fetched_bytes = 0
        self._copied: dict[str, tuple[Layout, BatchRef]] = {}
        self._lent: dict[str, set[WorkerGroup]] = {}
        self._closed = False
        for name, spec in ({} if worker_cls is None else registered_methods(worker_cls)).items():
            if name in dir(type(self)):
                raise DispatchError(
                    f"{worker_cls and worker_cls.__name__}.{name}: worker groups have a member of this name; rename the method"
                )
            self._methods[name] = GroupMethod(self, name, spec, blocking=spec.blocking)

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
        """The place of each rank, in rank order."""

    @abstractmethod
    def _send(self, request: Request) -> PendingCall:
        """Sends to the ranks named in the request; returns at once (in process: when the method is done)."""

    @abstractmethod
    def close(self, deadline_s: float = 60.0) -> None:
        """Ends the processes of this group (and of roles that share them).  Never raises for workers that are dead."""

    # -- calls -------------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def methods(self) -> Iterable[str]:
        return sorted(self._methods)

    def deadline(self, method: str) -> Deadline:
        """Returns the deadline of a method: the one that it names, or the default one where it is not registered."""
        found = self._methods.get(method)
        name = DEFAULT_DEADLINE if found is None else found.deadline
        return Deadline(seconds=getattr(self.deadline_s, name), setting=f"trainer.deadline_s.{name}")

    def _request(self, method: str, ranks: list[RankRequest]) -> Request:
        if self._closed:
            raise DispatchError(f"{self.role}.{method}: this worker group was closed")
        for share in ranks:
            for value in (*share.args, *share.kwargs.values()):
                if isinstance(value, BatchRef):  # its rows do not travel, so the rank must have them
                    value.check_rank(share.rank)
        return Request(role=self.role, method=method, ranks=ranks, deadline=self.deadline(method))

    def _watch(self, request: Request, *, blocking: bool) -> Watch:
        workers = tuple(self.workers[rank.rank] for rank in request.ranks)
        call = ObservedCall(role=self.role, method=request.method, blocking=blocking, workers=workers)
        return Watch(call, self.observers, self._size_of)

    def _execute(self, method: str, ranks: list[RankRequest], finish: Callable[[dict[int, Any]], Any]) -> CallFuture:
        request = self._request(method, ranks)
        with self._watch(request, blocking=False) as watch:
            watch.send(ranks)
            return CallFuture(self._send(request), finish, watch)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> CallFuture:
        """Runs any method of the worker, registered or not, on all ranks with the same arguments (lists stay whole)."""
        ranks = [RankRequest(rank=rank, args=args, kwargs=dict(kwargs)) for rank in range(self.world_size)]
        return self._execute(method_name, ranks, lambda outputs: [outputs[rank] for rank in sorted(outputs)])

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Does as `execute_all_async` and waits; returns one output per rank."""
        outputs: list[Any] = self.execute_all_async(method_name, *args, **kwargs).get()
        return outputs

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> CallFuture:
        """Runs any method of the worker on rank 0 only."""
        return self._execute(method_name, [RankRequest(rank=0, args=args, kwargs=dict(kwargs))], lambda outputs: outputs[0])

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Does as `execute_rank_zero_async` and waits."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    # -- batches held by reference -----------------------------------------------------------------------------------------

    @property
    def processes(self) -> object:
        """Returns the identity of the processes: the groups of roles that share them have the same."""
        return self

    def exchange(self, ref: BatchRef, mesh: str) -> BatchRef:
        """Brings part r of `ref.chunk` to the ranks of shard r, under a key of its own.

        Nothing happens where every rank has its part; else the references from before are void.  Rows of this group's processes
        move in one collective of them, and rows of another's as by `receive`.  mesh: the arrangement of the calls that will read
        the rows.  Rows are read from the ranks whose results were collected; copies of them are dropped.
        """
        arranged = self.mesh(mesh)
        after, copies = Layout.even(len(ref), arranged.collecting), arranged.copies
        if self._has(ref, after, copies):
            return ref
        source = self._source_of(ref)
        if source.processes is not self.processes:
            moved = self.receive(ref, mesh)
            source.drop(ref)
            return moved
        key = _new_key(ref)
        moves = plan_exchange(ref, after, self.world_size, copies)
        sent = self._call_rows("exchange", [(rank.rank, rank, key) for rank in moves])
        self.exchanged_bytes += sum(sent.values())
        source._drop_copies(ref.keys)
        return BatchRef((key,), ref.small, ref.columns, after, self, copies)

    def place(self, batch: DataProto, mesh: str, key: str) -> BatchRef:
        """Sends part r of `batch.chunk` to the ranks of shard r, once, where its columns of more than one number a row stay under
        `key`; the others are the reference's."""
        arranged = self.mesh(mesh)
        wide = [name for name, column in batch.tensors().items() if column.is_nested or column.dim() > 1]
        parts = batch.select(wide, [], []).chunk(arranged.dp_size)
        kept = self._call_rows("keep", [(rank, parts[dp], key) for rank, dp in enumerate(arranged.dp_ranks)])
        small = batch.select([name for name in batch.tensors() if name not in wide])
        after = Layout.even(len(batch), arranged.collecting)
        return BatchRef((key,), small, kept[0].columns, after, self, arranged.copies)

    def add_columns(self, ref: BatchRef) -> BatchRef:
        """Sends the columns of `ref.small` of more than one number a row to the ranks that have the rows, all of one batch, where
        they stay; returns the reference with them."""
        wide = [name for name, column in ref.small.tensors().items() if column.is_nested or column.dim() > 1]
        if not wide:
            return ref
        columns, calls = ref.small.select(wide, [], []), []
        for rank in range(self.world_size):
            rows = np.flatnonzero(ref.layout.rank == ref.copies.get(rank, rank))
            calls.append((rank, columns.select_idxs(rows[np.argsort(ref.layout.place[rows])]), ref.key))
        kept = self._call_rows("keep", calls)
        small = ref.small.select([name for name in ref.small.tensors() if name not in wide])
        return BatchRef(ref.keys, small, ref.columns | kept[0].columns, ref.layout, self, ref.copies)

    def collect(self, small: DataProto, columns: dict[str, ColumnInfo], sources: SourcesOf, mesh: str, key: str) -> BatchRef:
        """Lets the ranks get rows from processes outside of all worker groups: part r of the rows those of shard r, under `key`.

        small: the columns that are here.  columns: the others.  sources: returns for some of the rows the processes that have
        them, each with the places of its rows among these.  Raises HolderLostError where one of the processes has ended.
        """
        arranged = self.mesh(mesh)
        bounds = chunk_bounds(len(small), arranged.dp_size)
        parts = [sources(np.arange(start, stop)) for start, stop in bounds]
        calls = [(rank, parts[dp], columns, key) for rank, dp in enumerate(arranged.dp_ranks)]
        collected = self._call_rows("collect", calls).values()
        self.exchanged_bytes += sum(num_bytes for _, num_bytes in collected)
        after = Layout.even(len(small), arranged.collecting)
        ref = BatchRef((key,), small, columns, after, self, arranged.copies)
        for lost, _ in collected:
            if lost:
                ref.drop()
                raise HolderLostError("it had rows of the batch, and has ended", role=lost, rank=0, node="")
        return ref

    def receive(self, ref: BatchRef, to: str | BatchRef) -> BatchRef:
        """Returns the rows of `ref` on this group's ranks, in the same order; they stay where they are, too.

        to: the mesh of the calls that will read the rows, whose shard r gets part r of `ref.chunk` under a key of its own.  Or a
        batch that this group has, whose rows are the same in the same order: it gets the columns of `ref`, and its `union` with
        the result is the whole.  `ref.select` chooses what travels: all pieces that one rank sends to another are put once where
        that can get them, and the handles go through this process.  `ref` itself is returned where the ranks have the rows.
        """
        return self.begin_receive(ref, to)()

    def begin_receive(self, ref: BatchRef, to: str | BatchRef) -> Callable[[], BatchRef]:
        """Does the half of `receive` that waits for the ranks that have the rows; what it returns does the other half."""
        arranged = self.mesh(to) if isinstance(to, str) else None
        if isinstance(to, BatchRef):
            key, after, copies = to.key, to.layout, to.copies
        elif arranged is not None:
            key, after, copies = "", Layout.even(len(ref), arranged.collecting), arranged.copies
        if self._has(ref, after, copies) and key in ("", *ref.keys):
            return lambda: ref
        key, source = key or _new_key(ref), self._source_of(ref)
        sends, receives = plan_transfer(ref, after, (source.world_size, self.world_size))
        put = source._call_rows("send", [(rank, moves) for rank, moves in enumerate(sends) if moves.rows.size])
        self.exchanged_bytes += sum(sent for _, sent in put.values())

        def get() -> BatchRef:
            homes = {rank: copies.get(rank, rank) for rank in range(self.world_size)}
            pieces = {home: {sender: sent[home] for sender, (sent, _) in put.items() if home in sent} for home in homes.values()}
            self._call_rows("receive", [(rank, receives[home], key, source.role, pieces[home]) for rank, home in homes.items()])
            return BatchRef((key,), ref.small, ref.columns, after, self, copies)

        return get

    def copy_of(self, ref: BatchRef, mesh: str) -> BatchRef:
        """Returns the rows of a batch of other processes on this group's ranks, which keep them until the batch is dropped there.

        Only columns that are not here yet travel.  A call on a batch of other processes does this by itself; doing it before
        those processes are busy spares the call from waiting for them.  Columns that the call adds go back the same way.
        """
        layout, here = self._copied.get(ref.key, (ref.layout, None))
        if not ref.layout.same(layout):
            raise DispatchError(f"{self.role}: batch {ref.key!r} was copied here with other rows, or in another order")
        missing = [name for name in ref.columns if here is None or name not in here.columns]
        if missing or here is None:
            came = self.receive(ref.select(missing, [], []), mesh if here is None else here)
            here = came if here is None else here.union(came)
            self._copied[ref.key] = ref.layout, here
            self._source_of(ref)._lent.setdefault(ref.key, set()).add(self)
        columns = {name: here.columns[name] for name in ref.columns}
        return BatchRef(here.keys, ref.small, columns, here.layout, self, here.copies)

    def _give_back(self, result: BatchRef, given: BatchRef) -> BatchRef:
        """Adds the columns that a call has left with the copy of a batch to the batch itself."""
        self._copied[given.key][1].columns.update(result.columns)
        return self._source_of(given).receive(result, given)

    def _lacks(self, ref: BatchRef, mode: DispatchMode) -> bool:
        """Returns whether the rows are with other processes, or with other ranks of this group than the mode's mesh wants."""
        if self._source_of(ref).processes is not self.processes:
            return True
        return bool(mode.mesh) and len(ref.keys) == 1 and ref.copies != self.mesh(mode.mesh).copies

    def _source_of(self, ref: BatchRef) -> WorkerGroup:
        """Returns the group whose processes have the rows."""
        return ref.group if isinstance(ref.group, WorkerGroup) else self

    def _has(self, ref: BatchRef, layout: Layout, copies: Mapping[int, int]) -> bool:
        """Returns whether the rows of one batch are where a layout wants them."""
        here = self._source_of(ref).processes is self.processes and len(ref.keys) == 1
        return here and ref.layout.same(layout) and ref.copies == copies

    def fetch_rows(self, ref: BatchRef) -> DataProto:
        """Returns the wide columns of these rows, and counts their bytes; see `BatchRef.fetch`."""
        ranks = np.unique(ref.layout.rank).tolist() or [0]
        rows = [np.flatnonzero(ref.layout.rank == rank) for rank in ranks]
        chosen = [(rank, ref.select_idxs(here)) for rank, here in zip(ranks, rows, strict=True)]
        parts = self._call_rows("fetch", chosen)
        fetched = DataProto.concat([parts[rank] for rank in ranks])
        self.fetched_bytes += sum(map(num_bytes, fetched.tensors().values()))
        return fetched.select_idxs(np.argsort(np.concatenate(rows), kind="stable"))

    def save_rows(self, ref: BatchRef, stem: Path) -> list[tuple[Path, np.ndarray]]:
        """Lets each rank write the wide columns of its rows to a file, `<stem>.<rank>.safetensors`; returns the files, each with
        the numbers of its rows in `ref`."""
        ranks = np.unique(ref.layout.rank).tolist()
        rows = {rank: np.flatnonzero(ref.layout.rank == rank) for rank in ranks}
        files = {rank: stem.with_name(f"{stem.name}.{rank}.safetensors") for rank in ranks}
        self._call_rows("save", [(rank, ref.select_idxs(rows[rank]), files[rank]) for rank in ranks])
        return [(files[rank], rows[rank]) for rank in ranks]

    def drop(self, ref: BatchRef) -> None:
        """Lets the ranks forget the batches of the reference, and others their copies of them: its step is over."""
        self._submit_drop(ref).get()

    def _submit_drop(self, ref: BatchRef) -> CallFuture:
        dropping = self._submit_rows("drop", [(rank, ref.keys) for rank in range(self.world_size)])
        self._drop_copies(ref.keys)
        return dropping

    def _drop_copies(self, keys: Iterable[str]) -> None:
        """Lets other groups forget copies once they have done what they were asked before; waits for none of them.

        Ranks take calls in order, so that a later `stored_bytes` does not count the copies.
        """
        for key in keys:
            for group in self._lent.pop(key, ()):
                group._submit_drop(group._copied.pop(key)[1])

    def stored_bytes(self) -> list[int]:
        """Returns the bytes that each rank's process keeps of batches held by reference."""
        stored = self._call_rows("stored_bytes", [(rank,) for rank in range(self.world_size)])
        return [stored[rank] for rank in range(self.world_size)]

    def _call_rows(self, method: str, calls: Iterable[tuple[Any, ...]]) -> dict[int, Any]:
        """Calls the RowKeepers of ranks: (rank, argument, ...).  Returns their outputs."""
        outputs: dict[int, Any] = self._submit_rows(method, calls).get()
        return outputs

    def _submit_rows(self, method: str, calls: Iterable[tuple[Any, ...]]) -> CallFuture:
        request = self._request(method, [RankRequest(rank=call[0], args=call[1:]) for call in calls])
        request.rows = True
        with self._watch(request, blocking=True) as watch:
            watch.send(request.ranks)
            pending = self._send(request)
        return CallFuture(pending, lambda outputs: outputs, watch)

    def mesh(self, name: str) -> Mesh:
        """Returns the arrangement that the workers declared under `name`; queried on first use, then cached."""
        if name not in self._meshes:
            self._meshes[name] = build_mesh(self.role, name, self.execute_all_sync("query_mesh", name))
        return self._meshes[name]


SourcesOf = Callable[[np.ndarray], list[tuple[RowSource, np.ndarray]]]


_EXCHANGES = itertools.count(1)
"""Numbers the keys under which rows come to new homes: roles share stores, so all groups count together."""


def _new_key(ref: BatchRef) -> str:
    return f"{ref.keys[0].partition('+')[0]}+{next(_EXCHANGES)}"


def build_mesh(role: str, name: str, infos: Sequence[MeshInfo | tuple[str, ...]]) -> Mesh:
    """Checks the ranks' declarations and puts them together; every shard needs exactly one collecting rank."""
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
