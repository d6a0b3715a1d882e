"""Pipeline, which declares a training step node by node, and TaskGraph, the checked graph of one.

    step = Pipeline("mine")
    step.add("sample", on="rollout", writes="responses response_mask")
    step.add("score", run="my_scorers.py:brevity", reads="responses", writes="scores valid")
    ...
    graph = step.build()

The text is read from top to bottom like the algorithm in a paper: a node stands below those whose columns it reads.  Its order
says nothing else: nodes that do not depend on each other run at the same time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

from rlhub.config.names import target_problems
from rlhub.errors import ConfigError
from rlhub.pipeline.checks import NONE_MISSING, ROLES, check_nodes
from rlhub.pipeline.nodes import Edge, Node, NodeFields, find_edges
from rlhub.registry import suggest

SCHEMA_VERSION = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class TaskGraph:
    """The nodes of a step in an order in which they can run, the same on every rank, and the edges between them.

    skipped: the names of declared nodes that do not run in this configuration.  roles: the pipeline's own, see Pipeline.
    """

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    skipped: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)

    def node(self, name: str) -> Node:
        """Returns the node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def sources(self, name: str) -> list[str]:
        """Returns the nodes for which this one waits."""
        return [edge.source for edge in self.edges if edge.target == name]

    def as_dict(self) -> dict[str, Any]:
        """Returns the graph as JSON can hold it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "nodes": [
                {
                    "name": node.name,
                    "type": node.type,
                    "role": node.role,
                    "run": node.run,
                    "reads": [*map(str, node.reads)],
                    "writes": [*map(str, node.writes)],
                    "trains": node.trains,
                    "when": node.when,
                    "gathers": [*node.gathers],
                    "after": [*node.after],
                }
                for node in self.nodes
            ],
            "edges": [
                {"from": edge.source, "to": edge.target, "columns": [*edge.columns], "trains": edge.trains, "after": edge.after}
                for edge in self.edges
            ],
            "skipped": [*self.skipped],
        }

    @property
    def hash(self) -> str:
        """Returns 16 hexadecimal digits that are equal for equal graphs, on every machine."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class Pipeline:
    """The nodes of a step as they were declared.  roles: workers of roles beside the usual ones, "module:Class" each.

    A mistake is noted, and `build` names all of them together.
    """

    name: str
    roles: Mapping[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    _problems: list[str] = field(default_factory=list)

    def add(self, name: str, **fields: Unpack[NodeFields]) -> Self:
        """Adds a node at the bottom.  fields: see Node."""
        return self._place(len(self.nodes), name, fields)

    def insert(self, name: str, *, above: str = "", below: str = "", **fields: Unpack[NodeFields]) -> Self:
        """Adds a node directly above or below another one."""
        index = self._find(above or below, f"insert({name!r})")
        return self if index is None else self._place(index + (not above), name, fields)

    def replace(self, replaced: str, name: str, **fields: Unpack[NodeFields]) -> Self:
        """Puts a node in the place of another one."""
        index = self._find(replaced, f"replace({replaced!r})")
        if index is not None:
            del self.nodes[index]
            self._place(index, name, fields)
        return self

    def remove(self, *names: str) -> Self:
        """Takes nodes out."""
        for name in names:
            index = self._find(name, f"remove({name!r})")
            if index is not None:
                del self.nodes[index]
        return self

    def problems(
        self, settings: Any = None, usual: Mapping[str, str] = ROLES, missing: Mapping[str, str] = NONE_MISSING
    ) -> list[str]:
        """Returns all that is wrong.

        settings: the configuration whose settings conditions may name; None: any.  usual: the roles beside the pipeline's own.
        missing: those of them that the job does not have, with the remedy of each.
        """
        classes = [text for role, target in self.roles.items() for text in target_problems(f"role {role!r}", target)]
        return [*self._problems, *classes, *check_nodes(self.nodes, {**usual, **self.roles}, settings, missing)]

    def build(self, settings: Any = None, usual: Mapping[str, str] = ROLES) -> TaskGraph:
        """Returns the graph of the nodes that run.  Raises ConfigError with all problems."""
        if problems := self.problems(settings, usual):
            raise ConfigError([f"pipeline {self.name!r}: {problem}" for problem in problems])
        return self.graph()

    def graph(self) -> TaskGraph:
        """Returns the graph of the nodes that run, of a pipeline that was checked."""
        active = [node for node in self.nodes if node.when is not False]
        skipped = tuple(node.name for node in self.nodes if node.when is False)
        edges = tuple(find_edges(active))
        return TaskGraph(name=self.name, nodes=tuple(active), edges=edges, skipped=skipped, roles=dict(self.roles))

    def _place(self, index: int, name: str, fields: NodeFields) -> Self:
        for unknown in fields.keys() - NodeFields.__annotations__.keys():
            known = NodeFields.__annotations__
            self._problems.append(f"node {name!r} has no field {unknown!r}{suggest(unknown, known)}; known: {', '.join(known)}")
        self.nodes.insert(index, Node.of(name, fields))
        return self

    def _find(self, name: str, call: str) -> int | None:
        names = [node.name for node in self.nodes]
        if name in names:
            return names.index(name)
        self._problems.append(f"{call}: no node {name!r}{suggest(name, names)}; there are: {', '.join(names) or 'none'}")
        return None
