"""A node of a pipeline, one call of a training step, and the edges that follow from what nodes read, write and train.

An edge says that one node waits for another, for one of four reasons: it reads columns that the other writes; it trains a role
whose weights the other uses; one of them moves the rows whose tokens the other uses; or it says so (`after`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from rlhub.pipeline.columns import COLUMNS, ROW_ORDER, Use, parse_uses

DRIVER = "driver"
NodeType = Literal["compute", "data_load", "env_interact", "model_inference", "model_train"]


class NodeFields(TypedDict, total=False):
    """The arguments of a node beside its name; `Node` explains them."""

    run: str
    on: str
    reads: str | Iterable[str]
    writes: str | Iterable[str]
    trains: str
    when: bool | str
    gathers: str | Iterable[str]
    after: str | Iterable[str]


@dataclass(slots=True, frozen=True, kw_only=True)
class Node:
    """One call of a step.

    run: "module:function" or "path.py:function", called with the columns as a batch; else a method, of the driver or of the
    workers of `on`.
    on: the role whose processes or weights it uses, or "driver".
    reads, writes: its columns (columns.py); it gets no others, and may return no others.
    trains: the role whose weights it changes, or "".
    when: False takes it out of the graph; a condition (conditions.py) is asked at every step.
    gathers: columns of one number a row that must be those of all ranks where every rank runs the loop; it is then computed by
    every rank from the same numbers.
    after: nodes that must end first although no column says so.
    """

    name: str
    run: str
    on: str = DRIVER
    reads: tuple[Use, ...] = ()
    writes: tuple[Use, ...] = ()
    trains: str = ""
    when: bool | str = True
    gathers: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, fields: NodeFields) -> Node:
        """Returns a node whose columns are given as text; its `run` is its name where none is given."""
        return cls(
            name=name,
            run=fields.get("run", name),
            on=fields.get("on", DRIVER),
            reads=parse_uses(fields.get("reads", ())),
            writes=parse_uses(fields.get("writes", ())),
            trains=fields.get("trains", ""),
            when=fields.get("when", True),
            gathers=_words(fields.get("gathers", ())),
            after=_words(fields.get("after", ())),
        )

    @property
    def type(self) -> NodeType:
        """Returns the kind of work, which follows from `on`, `trains` and `reads`."""
        if self.trains:
            return "model_train"
        if self.on == DRIVER:
            return "compute" if self.reads or not self.writes else "data_load"
        return "env_interact" if self.on.startswith("env") else "model_inference"

    @property
    def role(self) -> str:
        """Returns the role, which is `on`."""
        return self.on

    @property
    def rearranges(self) -> bool:
        """Returns whether it puts the rows in another order."""
        return any(use.name == ROW_ORDER for use in self.writes)


@dataclass(slots=True, frozen=True, kw_only=True)
class Edge:
    """`target` waits for `source`.  columns: those that it reads from there; trains: the role whose weights source uses, or
    trains, before target trains it; after: target says that it comes after."""

    source: str
    target: str
    columns: tuple[str, ...] = ()
    trains: str = ""
    after: bool = False

    @property
    def label(self) -> str:
        """Returns the reasons in a few words."""
        reasons = [" ".join(self.columns), f"trains {self.trains}" if self.trains else "", "after" if self.after else ""]
        return ", ".join(filter(None, reasons))


def find_edges(nodes: Sequence[Node]) -> list[Edge]:
    """Returns the edges between nodes, in their order, each pair once.

    A node that uses the weights of a role comes before those below it that train the role.
    """
    reasons: dict[tuple[str, str], tuple[list[str], str, bool]] = {}

    def reason(source: str, target: str) -> tuple[list[str], str, bool]:
        return reasons.get((source, target), ([], "", False))

    position = {node.name: index for index, node in enumerate(nodes)}
    for source, target, column in column_pairs(nodes):
        columns, trains, after = reason(source, target)
        reasons[source, target] = [*columns, column], trains, after
    for below, node in enumerate(nodes):
        for other in nodes[:below] if node.trains else ():
            if node.trains in (other.on, other.trains):
                columns, _, after = reason(other.name, node.name)
                reasons[other.name, node.name] = columns, node.trains, after
        for source in node.after:
            columns, trains, _ = reason(source, node.name)
            if source in position:
                reasons[source, node.name] = columns, trains, True
    edges = [
        Edge(source=source, target=target, columns=tuple(columns), trains=trains, after=after)
        for (source, target), (columns, trains, after) in reasons.items()
    ]
    edges += _beside_moves(nodes, edges)
    return sorted(edges, key=lambda edge: (position[edge.target], position[edge.source]))


def _beside_moves(nodes: Sequence[Node], edges: Sequence[Edge]) -> Iterator[Edge]:
    """Yields an edge between a node that puts the rows in another order, which may move them to other processes, and each of
    those that use columns of tokens: nodes above it end first, nodes below it start then.

    The driver's own functions are excepted: they take their rows at once.
    """
    before = ancestors(edges)
    wide = {name for name, column in COLUMNS.items() if column.wide}
    wide |= {use.name for node in nodes for use in node.writes if use.dims is not None and len(use.dims) > 1}
    for index, mover in enumerate(nodes):
        for other, node in enumerate(nodes) if mover.rearranges else ():
            ordered = mover.name in before.get(node.name, ()) or node.name in before.get(mover.name, ())
            taken_at_once = node.on == DRIVER and ":" not in node.run
            if other == index or ordered or taken_at_once or wide.isdisjoint(use.name for use in (*node.reads, *node.writes)):
                continue
            source, target = (node, mover) if other < index else (mover, node)
            yield Edge(source=source.name, target=target.name, after=True)


def column_pairs(nodes: Sequence[Node]) -> Iterator[tuple[str, str, str]]:
    """Yields (writer, reader, column) for each column that one node reads and another writes."""
    for reader in nodes:
        for use in reader.reads:
            for writer in nodes:
                for written in writer.writes if writer is not reader else ():
                    if use.covers(written.name) or written.covers(use.name):
                        yield writer.name, reader.name, use.name if written.family else written.name


def ancestors(edges: Iterable[Edge]) -> Mapping[str, set[str]]:
    """Returns for each node all that must end before it; a node of a cycle is its own ancestor."""
    sources: dict[str, list[str]] = {}
    for edge in edges:
        sources.setdefault(edge.target, []).append(edge.source)
    found: dict[str, set[str]] = {}
    for node in sources:
        reached: set[str] = set()
        stack = [node]
        while stack:
            for source in sources.get(stack.pop(), ()):
                if source not in reached:
                    reached.add(source)
                    stack.append(source)
        found[node] = reached
    return found


def _words(given: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(given.split()) if isinstance(given, str) else tuple(given)
