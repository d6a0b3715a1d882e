"""Runs the graph of a step: every node once, when all that it waits for has ended, and independent ones at the same time.

A node gets the columns that it declares, and may return only those that it declares to write; rows that are here (DataProto) and
rows held by reference (BatchRef) are the same to it.  Calls of workers are submitted, and functions run in threads.  A node runs
in the caller's thread while no other does, so that its errors and interrupts are those of a plain loop.  Of nodes that are ready
together those that stand first start first.

Rows in another order: a node that writes `row_order` gets all columns and returns all rows in the new order.  What started before
and ends after it still has the old order; its columns are put into the new one.

Where every rank runs the same graph (`in_order`), nodes run in the order of the text, one at a time and in the caller's thread:
most of them talk to other ranks inside, a user's function does where it fetches rows, and which of them is ready first differs
from rank to rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from rlhub.errors import ProtocolError, RlhubError
from rlhub.pipeline.columns import ROW_ORDER, Use
from rlhub.pipeline.conditions import holds
from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.nodes import Node
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.registry import suggest
from rlhub.single_controller.calls import GRACE_S, cause_of
from rlhub.utils.user_code import load_target

Output = Batch | None
METRICS = "metrics"
"""The entry of an output's meta_info with the node's metrics."""


class Calls(Protocol):
    """Calls what the nodes of a graph name."""

    def start(self, node: Node, batch: Batch) -> Callable[[], Output]:
        """Begins a node's call; called in the caller's thread, in the order of the nodes.  The function that it returns is called
        once, perhaps in another thread, and waits for the output."""
        ...


@dataclass(slots=True)
class RoleCalls:
    """Calls registered methods of worker groups by role, and functions of the driver by name or by "module:function"."""

    functions: Mapping[str, Callable[[Batch], Output]]
    groups: Mapping[str, Any]

    def start(self, node: Node, batch: Batch) -> Callable[[], Output]:
        if ":" in node.run:
            return partial(load_target(node.run), batch)
        if node.run in self.functions:
            return partial(self.functions[node.run], batch)
        wait: Callable[[], Output] = getattr(self.groups[node.on], node.run).submit(batch).get
        return wait


@dataclass(slots=True, frozen=True)
class NodeTime:
    """When a node started and ended, in seconds since the step began."""

    start_s: float
    end_s: float


@dataclass(slots=True)
class StepResult:
    """The results of a step.  metrics: meta_info["metrics"] by node; timings: by node; both in the order of the nodes."""

    batch: Batch
    metrics: dict[str, Any]
    timings: dict[str, NodeTime]


@dataclass(slots=True)
class Executor:
    """Runs the graph.  settings: the configuration that conditions read.  in_order: see the module docstring."""

    graph: TaskGraph
    calls: Calls
    settings: Any = None
    in_order: bool = False

    def __call__(self, step: int) -> StepResult:
        """Takes step `step` (from 1).  Raises what the first node to fail raised, with the node's name in its text."""
        return _Step(self, step).run()


@dataclass(slots=True)
class _Started:
    """A node that runs.  orders: how often the rows had been put into another order before."""

    node: Node
    wait: Callable[[], Output]
    orders: int
    start: float


Ended = tuple[_Started, Output, BaseException | None]


@dataclass(slots=True)
class _Step:
    """One step in work.  waits: the nodes that have not started, with those they wait for; running: the threads' nodes."""

    executor: Executor
    number: int
    batch: Batch = field(init=False)
    waits: dict[str, set[str]] = field(init=False)
    running: dict[str, _Started] = field(init=False, default_factory=dict)
    orders: list[Any] = field(init=False, default_factory=list)
    metrics: dict[str, Any] = field(init=False, default_factory=dict)
    timings: dict[str, NodeTime] = field(init=False, default_factory=dict)
    ended: SimpleQueue[Ended] = field(init=False, default_factory=SimpleQueue)
    began: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        graph = self.executor.graph
        self.batch = DataProto(meta_info={"step": self.number})
        self.waits = {node.name: set() for node in graph.nodes}
        for edge in graph.edges:
            self.waits[edge.target].add(edge.source)

    def run(self) -> StepResult:
        graph = self.executor.graph
        while self.waits or self.running:
            ready = self._ready()
            for position, node in enumerate(ready):
                last = position == len(ready) - 1
                self._start(node, inline=last and not self.running)
            if self.running and (not ready or not self.ended.empty()):
                self._take(self.ended.get())
        order = [node.name for node in graph.nodes]
        return StepResult(
            batch=self.batch,
            metrics={name: self.metrics[name] for name in order if name in self.metrics},
            timings={name: self.timings[name] for name in order if name in self.timings},
        )

    def _ready(self) -> list[Node]:
        """Returns the nodes that may start now, in their order; those whose condition does not hold are passed over."""
        nodes = self.executor.graph.nodes
        while True:
            ready = [node for node in nodes if node.name in self.waits and not self.waits[node.name]]
            skipped = [node for node in ready if isinstance(node.when, str) and not self._holds(node.when)]
            if not skipped:
                break
            for node in skipped:
                self._end(node)
        return ready[:1] if self.executor.in_order else ready

    def _holds(self, condition: str) -> bool:
        return holds(condition, self.number, self.executor.settings)

    def _start(self, node: Node, *, inline: bool) -> None:
        del self.waits[node.name]
        start = time.perf_counter()
        with self._named(node):
            wait = self.executor.calls.start(node, self._inputs(node))
        started = self.running[node.name] = _Started(node, wait, len(self.orders), start)
        if inline:
            self._wait(started)
        else:
            Thread(target=self._wait, args=(started,), name=f"node-{node.name}", daemon=True).start()

    def _wait(self, started: _Started) -> None:
        """Waits for a node's output and hands it to the caller's thread."""
        try:
            self.ended.put((started, started.wait(), None))
        except BaseException as error:  # noqa: BLE001 - boundary of the thread: raised in the caller's
            self.ended.put((started, None, error))

    def _take(self, ended: Ended) -> None:
        """Takes notice of a node's end: adds its columns to the batch."""
        started, output, error = ended
        node = started.node
        del self.running[node.name]
        self.timings[node.name] = NodeTime(started.start - self.began, time.perf_counter() - self.began)
        with self._named(node):
            if error is not None:
                raise error
            self._add(started, output)
        self._end(node)

    def _end(self, node: Node) -> None:
        self.waits.pop(node.name, None)
        for waiting in self.waits.values():
            waiting.discard(node.name)

    @contextmanager
    def _named(self, node: Node) -> Iterator[None]:
        """Names the node in an error, and raises the failure that explains it: others that run have a moment to fail as well, for
        a death explains what it did to other groups that wait for the dead rank."""
        try:
            yield
        except Exception as error:
            errors = [error, *self._failures()]
            name_node(error, node, self.executor.graph.name)
            cause = cause_of(errors)
            if cause is error:
                raise
            raise cause from cause.__cause__

    def _failures(self) -> Iterator[Exception]:
        """Yields how the nodes that run fail within the grace."""
        until = time.monotonic() + GRACE_S
        while self.running and time.monotonic() < until:
            if self.ended.empty():
                time.sleep(0.01)
                continue
            started, _, failure = self.ended.get()
            del self.running[started.node.name]
            if isinstance(failure, Exception):
                yield name_node(failure, started.node, self.executor.graph.name)

    # -- columns -----------------------------------------------------------------------------------------------------------

    def _inputs(self, node: Node) -> Batch:
        """Returns the columns that the node declares, or all where it puts the rows in another order."""
        present = names_of(self.batch)
        meta = [*self.batch.meta_info]
        uses = [use for use in node.reads if use.name != ROW_ORDER]
        names = present if node.rearranges else declared(uses, present)
        for use in uses:
            if not (use.optional or use.family or use.name in present or use.name in meta):
                raise ProtocolError(f"it reads {use.name!r}, which is not there; there are: {', '.join(present) or 'none'}")
        return select(self.batch, names, declared(uses, meta))

    def _add(self, started: _Started, output: Output) -> None:
        node = started.node
        if output is None:
            output = DataProto()
        metrics = output.meta_info.pop(METRICS, None)
        if metrics is not None:
            self.metrics[node.name] = metrics
        names = names_of(output)
        before = names_of(self.batch)
        given = {*before, *self.batch.meta_info, *self._written(node)} if node.rearranges else ()
        self._check(node, [name for name in (*names, *output.meta_info) if name not in given])
        if node.rearranges:
            self._rearrange(output, [name for name in before if name not in names])
            return
        orders = self.orders[started.orders :] if names else []
        if orders and isinstance(output, BatchRef) and not output.columns:
            output = output.small  # the rows of before, which it names, are void
        for order in orders:
            output.reorder(order)
        self.batch = join(self.batch, output)

    def _written(self, mover: Node) -> set[str]:
        """Returns what the nodes that ended before may have written: rows that move may be stored in another form."""
        ended = [node for node in self.executor.graph.nodes if node is not mover and node.name in self.timings]
        return {use.name for node in ended for use in node.writes}

    def _check(self, node: Node, written: Sequence[str]) -> None:
        """Raises ProtocolError for columns that a node may not write, and for those that it did not although it says so."""
        own = declared(node.writes, written)
        for name in (name for name in written if name not in own):
            known = [use.name for use in node.writes]
            hint = f"{suggest(name, known)}; it declares: {', '.join(known) or 'none'}"
            raise ProtocolError(f"it returned column {name!r}, which it does not declare to write{hint}")
        for use in node.writes:
            if not (use.optional or use.family or use.name in written):
                raise ProtocolError(f"it did not return column {use.name!r}, which it declares to write")

    def _rearrange(self, output: Batch, late: Sequence[str]) -> None:
        """Puts the rows of a node in the place of all rows.  late: columns that came while it ran, in the order of before."""
        order = output.batch.pop(ROW_ORDER)
        rest = select(self.batch, late, [*self.batch.meta_info])
        if late:
            rest.reorder(order)
        if isinstance(rest, BatchRef):
            rest = rest.small  # the rows of before are void
        self.orders.append(order)
        self.batch = join(output, rest)


def name_node(error: Exception, node: Node, pipeline: str) -> Exception:
    """Adds the node's name to an error, which keeps its type and fields, and returns it."""
    where = f"(node {node.name!r} of pipeline {pipeline!r}, on {node.on})"
    if isinstance(error, RlhubError) and error.args:
        error.args = (f"{error.args[0]} {where}", *error.args[1:])
    else:
        error.add_note(where)
    return error


def names_of(rows: Batch) -> list[str]:
    """Returns the names of all columns, sorted."""
    return sorted(rows.names() if isinstance(rows, BatchRef) else {*rows.tensors(), *rows.non_tensor_batch})


def select(rows: Batch, names: Sequence[str], meta: Sequence[str]) -> Batch:
    """Returns the rows with those columns and meta entries, over the same storage."""
    arrays = rows.non_tensor_batch
    return rows.select([name for name in names if name not in arrays], [name for name in names if name in arrays], meta)


def join(rows: Batch, other: Batch) -> Batch:
    """Returns the columns of both; a reference takes up rows that are here."""
    if isinstance(other, BatchRef) and not isinstance(rows, BatchRef):
        return join(other, rows)
    if isinstance(rows, BatchRef):
        return rows.union(other)
    assert isinstance(other, DataProto)
    return rows.union(other)


def declared(uses: Sequence[Use], names: Sequence[str]) -> list[str]:
    """Returns those of the names that a node declares."""
    single = {use.name for use in uses}
    families = [use for use in uses if use.family]
    return [name for name in names if name in single or any(family.covers(name) for family in families)]
