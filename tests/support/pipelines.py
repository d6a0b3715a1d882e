"""Small pipelines for tests and figures: graphs of functions, nodes at random, and what a chosen algorithm needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from rlhub.pipeline.executor import Output, names_of
from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.nodes import Edge, Node, NodeFields, find_edges
from rlhub.protocol import Batch, DataProto

NUM_ROWS = 3


@dataclass(slots=True, kw_only=True)
class SomeNeeds:
    """What a test's algorithm needs; everything, unless it says otherwise."""

    values: bool = True
    own_values: bool = False
    reference: bool = True
    old_log_probs: bool = True
    correction: bool = True
    selection: bool = True


def graph_of(nodes: Sequence[tuple[str, NodeFields]], edges: Sequence[Edge] | None = None) -> TaskGraph:
    """An unchecked graph; edges: instead of those that follow."""
    built = [Node.of(name, fields) for name, fields in nodes]
    return TaskGraph(name="test", nodes=tuple(built), edges=tuple(find_edges(built) if edges is None else edges))


@dataclass(slots=True)
class FunctionCalls:
    """Calls one function for every node, and remembers what started and ended in which order."""

    function: Callable[[Node, Batch], Output]
    events: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, node: Node, batch: Batch) -> Callable[[], Output]:
        self._note("start", node)
        return partial(self._run, node, batch)

    def _run(self, node: Node, batch: Batch) -> Output:
        try:
            return self.function(node, batch)
        finally:
            self._note("end", node)

    def _note(self, what: str, node: Node) -> None:
        with self.lock:
            self.events.append((what, node.name))

    @property
    def started(self) -> list[str]:
        return [name for what, name in self.events if what == "start"]


def mix(node: Node, batch: Batch) -> DataProto:
    """Columns of a node that depend on its name and on every number that it reads, and not on what else there is."""
    assert isinstance(batch, DataProto)
    assert names_of(batch) == sorted(use.name for use in node.reads), f"{node.name} sees {names_of(batch)}"
    return mixed(node, batch.tensors())


def mixed(node: Node, columns: Mapping[str, torch.Tensor]) -> DataProto:
    number = sum(map(ord, node.name)) + torch.arange(NUM_ROWS)
    for name in sorted(columns):
        number = (number * 31 + columns[name]) % 1_000_003
    return DataProto.from_dict({use.name: number + index for index, use in enumerate(node.writes)})
