"""Worker groups of a run in which every rank runs the control program (see world.py).

A call looks as it does under one driver: the program cuts the arguments into each rank's share.  Here each process runs its own
share of the call, in the order of the program, and the outputs of all ranks are gathered when the call is waited for, so that
every process goes on from the same values.  Processes of other pools have no share, and wait for the outputs where the program
does.  Batches are held by reference, so outputs are one number a row; rows for another pool travel from process to process.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlhub.errors import ConfigError, DeadlineError
from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.single_controller.calls import (
    GRACE_S,
    CallObserver,
    Deadline,
    ObservedCall,
    PendingCall,
    Request,
    Watch,
    WorkerInfo,
    cause_of,
    column_bytes,
)
from rlhub.single_controller.invoke import RankWorkers, RemoteError
from rlhub.single_controller.resources import MAIN_POOL, LaunchOptions
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext, applied_env
from rlhub.single_controller.worker_group import WorkerGroup
from rlhub.single_controller.world import World, current_world
from rlhub.utils.ports import free_port

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class Pool:
    """The processes of a pool: `size` of the world's, from `start` on."""

    name: str
    start: int
    size: int
    workers: tuple[WorkerInfo, ...]

    def rank_of(self, process: int) -> int | None:
        """Returns the rank in this pool of a process of the world; None for one of another pool."""
        rank = process - self.start
        return rank if 0 <= rank < self.size else None


class ReplicatedWorkerGroup(WorkerGroup):
    """A role on the ranks of a pool.  pieces: this process's end of the way between pools."""

    def __init__(
        self,
        role: str,
        spec: ClassWithInitArgs,
        pool: Pool,
        workers: RankWorkers,
        pieces: PieceExchange,
        observers: Sequence[CallObserver] = (),
    ) -> None:
        super().__init__(role, spec.cls, observers)
        self._pool, self._own, self._pieces = pool, workers, pieces
        self._world = pieces.world
        self._rank = pool.rank_of(self._world.rank)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._pool.workers

    @property
    def processes(self) -> object:
        return self._pool.name

    def _watch(self, request: Request, *, blocking: bool) -> Watch:
        """Reports this process's share: arguments do not travel, and outputs do."""
        workers = tuple(self.workers[share.rank] for share in request.ranks if share.rank == self._rank)
        call = ObservedCall(role=self.role, method=request.method, blocking=blocking, workers=workers)
        return _ReceivingWatch(call, self.observers, column_bytes)

    def _send(self, request: Request) -> PendingCall:
        if request.rows and request.method == "receive":
            self._pieces.move(self._pool, request)
        outputs: dict[int, Any] = {}
        failure = None
        for share in request.ranks:
            if share.rank == self._rank:
                try:
                    output = self._own.run(
                        request.worker,
                        request.method,
                        [_own_columns(value) for value in share.args],
                        {name: _own_columns(value) for name, value in share.kwargs.items()},
                        materialize=request.materialize,
                        retain=request.retain,
                    )
                except RemoteError as error:
                    failure = error
                else:
                    outputs[share.rank] = output if share.reply else None
        return _Gathered(self._world, request, outputs, failure)

    def close(self, deadline_s: float = 60.0) -> None:
        self._closed = True


def _own_columns(value: Any) -> Any:
    return value.select() if isinstance(value, DataProto) else value


class _ReceivingWatch(Watch):
    """Counts what reaches this process."""

    def send(self, ranks: Sequence[Any]) -> None:
        return


class _Gathered(PendingCall):
    """A call whose share of this process has ended; `wait`, which every process calls at the same point, gathers the outputs."""

    def __init__(self, world: World, request: Request, outputs: dict[int, Any], failure: RemoteError | None) -> None:
        self._world, self._request = world, request
        self._own: tuple[dict[int, Any], RemoteError | None] = outputs, failure
        self._sent = time.monotonic()
        self._gathered: list[tuple[dict[int, Any], RemoteError | None]] | None = None

    def wait(self) -> dict[int, Any]:
        if self._gathered is None:
            self._gathered = self._gather()
        failures = [failure for _, failure in self._gathered if failure is not None]
        if failures:
            error = cause_of([failure.error for failure in failures])
            raise error from next(failure.cause for failure in failures if failure.error is error)
        return {rank: output for outputs, _ in self._gathered for rank, output in outputs.items()}

    def _gather(self) -> list[tuple[dict[int, Any], RemoteError | None]]:
        failure = self._own[1]
        if failure is None:
            return self._world.gather(self._own, self._request.name, self._request.deadline)
        try:  # the others may hang in a collective with this rank: they end when it does
            return self._world.gather(self._own, self._request.name, Deadline(seconds=GRACE_S))
        except DeadlineError:
            return [self._own]

    def done(self) -> bool:
        """Is True: whether the others are done too would not be the same answer on every process."""
        return True

    def data_future(self, ranks: Sequence[int], watch: Watch) -> DataProtoFuture:
        def resolve(references: list[int]) -> list[DataProto]:
            try:
                outputs = self.wait()
            except BaseException as error:
                watch.end(error)
                raise
            watch.end()
            found = [outputs[rank] for rank in references]
            watch.receive(found)
            return found

        return DataProtoFuture(list(ranks), resolve)


class PieceExchange:
    """Is the Handover between pools: a piece stays with its process until the call that receives it is made, which every process
    makes; then it travels straight to the process that asks for it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._numbers = itertools.count()
        self._kept: dict[int, Tensor] = {}
        self._came: dict[tuple[int, int], Tensor] = {}

    def put(self, piece: Tensor) -> Handle:
        number = next(self._numbers)
        self._kept[number] = piece
        return self.world.rank, number, len(piece)

    def get(self, handle: Handle, role: str, rank: int) -> Tensor:
        return self._came.pop(handle[:2])

    def move(self, pool: Pool, request: Request) -> None:
        """Sends and receives this process's pieces of a call of `RowKeeper.receive`, whose last argument has the handles."""
        here, out, into = self.world.rank, [], []
        for share in request.ranks:
            to = pool.start + share.rank
            for source, number, size in share.args[-1].values():
                if source == here == to:
                    self._came[source, number] = self._kept[number]
                elif source == here:
                    out.append((to, number, self._kept[number]))
                elif to == here:
                    into.append((source, number, size))
        came = self.world.move(out, into, request.name)
        self._came.update({(source, number): piece for (source, number, _), piece in zip(into, came, strict=True)})
        self._kept.clear()


Handle = tuple[int, int, int]
"""The process of the world that has a piece, its number there, and its bytes."""


def launch_replicated(roles: Mapping[str, ClassWithInitArgs], options: LaunchOptions) -> ReplicatedRun:
    """Builds the roles of this process's pool; every process of the world calls it.

    Raises ConfigError where the pools have not as many ranks as the world has processes, WorkerError when a role cannot start.
    """
    world = current_world()
    if world is None:
        raise ConfigError("trainer.controller=multi: this process has joined no other ranks; start it by main_ppo")
    sizes = {MAIN_POOL: options.nnodes * options.ranks_per_node} | {
        name: sum(options.pools[name]) for name in sorted(options.pools)
    }
    if sum(sizes.values()) != world.size:
        listed = " + ".join(f"{size} ({name})" for name, size in sizes.items())
        raise ConfigError(
            f"trainer.controller=multi: {world.size} processes were started, but the pools have {listed} ranks; set "
            "trainer.nnodes and trainer.n_gpus_per_node (and trainer.pools) to what the launcher starts"
        )
    return ReplicatedRun(world, sizes, roles, options)


class ReplicatedRun:
    """The worker groups of all roles, and the workers of this process's pool."""

    def __init__(
        self, world: World, sizes: Mapping[str, int], roles: Mapping[str, ClassWithInitArgs], options: LaunchOptions
    ) -> None:
        place = world.place
        seats = world.gather((place.node, os.getpid(), free_port()), "workers.start", _start_deadline(options))
        starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        pools = {name: _pool(name, start, seats[start : start + sizes[name]]) for name, start in starts.items()}
        own = next(pool for pool in pools.values() if pool.rank_of(world.rank) is not None)
        context = WorkerContext(
            rank=world.rank - own.start,
            world_size=own.size,
            local_rank=place.local_rank,
            local_world_size=place.local_size,
            node=place.node,
            master_addr=seats[own.start][0],
            master_port=seats[own.start][2],
            device=options.device,
        )
        pieces = PieceExchange(world)
        self._rank = RankWorkers(pieces)
        self._env = applied_env({**context.env(), **OWN_STORE})
        self._env.__enter__()
        mapping = {role: pools[options.placement.get(role, MAIN_POOL)] for role in roles}
        self.groups: dict[str, WorkerGroup] = {
            role: ReplicatedWorkerGroup(role, spec, mapping[role], self._rank, pieces, options.observers)
            for role, spec in roles.items()
        }
        try:
            self._build({role: spec for role, spec in roles.items() if mapping[role] is own}, context, world, options)
        except BaseException:
            self.close()
            raise

    def _build(
        self, roles: Mapping[str, ClassWithInitArgs], context: WorkerContext, world: World, options: LaunchOptions
    ) -> None:
        """Builds this process's workers; the error of any process is raised on all."""
        failure: RemoteError | None = None
        for module in options.plugins:
            importlib.import_module(module)
        try:
            for role, spec in roles.items():
                self._rank.add(spec, replace(context, role=role))
        except RemoteError as error:
            failure = error
        for failed in world.gather(failure, "workers.__init__", _start_deadline(options)):
            if failed is not None:
                raise failed.error from failed.cause

    def close(self, deadline_s: float = 60.0) -> None:
        """Lets the workers release their resources.  Failures of theirs are logged."""
        try:
            self._rank.close()
        except RemoteError as failure:
            logger.warning("while closing: %s", failure.error)
        finally:
            self._env.__exit__(None, None, None)


OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""Tells torch that the first rank of a pool opens its store, and that it is not torchrun's own."""


def _start_deadline(options: LaunchOptions) -> Deadline:
    return Deadline(seconds=options.deadline_s.start, setting="trainer.deadline_s.start")


def _pool(name: str, start: int, seats: Sequence[tuple[str, int, int]]) -> Pool:
    workers = tuple(WorkerInfo(rank=rank, node=node, pid=pid) for rank, (node, pid, _) in enumerate(seats))
    return Pool(name=name, start=start, size=len(seats), workers=workers)
