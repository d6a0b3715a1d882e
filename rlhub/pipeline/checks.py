"""All that can be wrong with the nodes of a pipeline, found without running or importing what they name, and told together.

Every problem names its node and says what to do; a misspelt name comes with the closest known one.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rlhub.config.names import source_of, target_problems
from rlhub.pipeline.columns import COLUMNS, DIMS, DTYPES, StepColumn, Use
from rlhub.pipeline.conditions import condition_problem
from rlhub.pipeline.nodes import DRIVER, Edge, Node, ancestors, find_edges
from rlhub.registry import suggest

ROLES: Mapping[str, str] = {
    DRIVER: "rlhub.pipeline.builtin:Driver",
    "actor": "rlhub.workers.actor:ActorPart",
    "rollout": "rlhub.workers.rollout:RolloutPart",
    "reference": "rlhub.workers.actor:ReferenceWorker",
    "critic": "rlhub.workers.roles:CriticWorker",
    "reward_model": "rlhub.workers.roles:RewardModelWorker",
    "judge": "rlhub.workers.roles:JudgeWorker",
}
"""The class of each role's workers, "module:Class"; a pipeline may have roles of its own (`Pipeline.roles`)."""
NONE_MISSING: Mapping[str, str] = {}
READY_MADE = tuple(name for name, column in COLUMNS.items() if column.writer == "executor")


def check_nodes(
    nodes: Sequence[Node], roles: Mapping[str, str], settings: Any = None, missing: Mapping[str, str] = NONE_MISSING
) -> list[str]:
    """Returns the problems of a pipeline's nodes, in their order; [] where it can run.

    roles: the class of each role's workers, "module:Class".  settings: the configuration whose settings conditions may name;
    None: any.  missing: roles that the job does not have, with the remedy of each.
    """
    twice = [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
    problems = [f"node {name!r} is declared twice; rename one" for name in twice]
    checks = _Checks(list(nodes), roles, settings, missing)
    own: tuple[Callable[[Node], Iterator[str]], ...] = (
        checks.role,
        checks.target,
        checks.condition,
        checks.columns,
        checks.gathers,
        checks.after,
    )
    for node in nodes:
        problems += [f"node {node.name!r} {problem}" for check in own for problem in check(node)]
    return [*problems, *checks.writers(), *checks.order(), *checks.unused()]


@dataclass(slots=True)
class _Checks:
    """The names that the checks look up.  drivers: the driver's functions; written: the nodes that write each name; declared: all
    columns, with those of the pipeline."""

    nodes: list[Node]
    roles: Mapping[str, str]
    settings: Any
    missing: Mapping[str, str]
    drivers: set[str] = field(init=False)
    written: dict[str, list[Node]] = field(init=False, default_factory=dict)
    declared: dict[str, StepColumn] = field(init=False)

    def __post_init__(self) -> None:
        self.declared = declared_columns(self.nodes)
        self.drivers = methods_of(self.roles[DRIVER], True) or set()
        for node in self.nodes:
            for use in node.writes:
                self.written.setdefault(use.name, []).append(node)

    # -- one node ----------------------------------------------------------------------------------------------------------

    def role(self, node: Node) -> Iterator[str]:
        if node.on not in self.roles:
            yield f"is on role {node.on!r}, which there is not{suggest(node.on, self.roles)}; known: {', '.join(self.roles)}"
        elif node.on in self.missing and node.when is not False and ":" not in node.run and node.run not in self.drivers:
            yield f"is on {node.on}, which this job does not have: {self.missing[node.on]}"
        if node.trains and node.on == DRIVER:
            yield f"trains {node.trains!r} and is on no role: give on={node.trains!r}"
        elif node.trains and node.trains != node.on:
            yield f"trains {node.trains!r} but is on {node.on!r}; a node trains the role that it is on"

    def target(self, node: Node) -> Iterator[str]:
        if ":" in node.run:
            yield from (problem.replace("run=", "runs ", 1) for problem in target_problems("run", node.run))
            return
        own = methods_of(self.roles[node.on], node.on == DRIVER) if node.on in self.roles else None
        if own is None or node.run in self.drivers | own:
            return
        known = sorted(own if node.on == DRIVER else self.drivers | own)
        yield (
            f"runs {node.run!r}, which is no method of {'' if node.on == DRIVER else node.on + ' or '}the driver"
            f"{suggest(node.run, known)}; there are: {', '.join(known)}. Your own is 'module:name' or 'file.py:name'"
        )

    def condition(self, node: Node) -> Iterator[str]:
        problem = condition_problem(node.when, self.settings) if isinstance(node.when, str) else None
        if problem is not None:
            yield f"has when={node.when!r}, which {problem}"

    def columns(self, node: Node) -> Iterator[str]:
        for use in node.writes:
            yield from self._declaration(use, "writes")
        for use in node.reads:
            yield from self._declaration(use, "reads") if find_column(use.name, self.declared) else self._unknown(use, "reads")
            yield from self._writer(node, use)

    def _unknown(self, use: Use, verb: str) -> Iterator[str]:
        hint = suggest(use.name, self.declared)
        yield f"{verb} {use.name!r}, which is no column{hint}; its writer declares a new one: '{use.name}:float32(rows)'"

    def _declaration(self, use: Use, verb: str) -> Iterator[str]:
        """Compares a stated type with the declared one, and checks that of a new column."""
        if use.dtype is not None and use.dtype not in DTYPES:
            hint = suggest(use.dtype, DTYPES)
            yield f"{verb} {use.name!r} as {use.dtype!r}, which is no dtype{hint}; known: {', '.join(DTYPES)}"
        for dim in use.dims or ():
            if dim not in DIMS:
                yield f"{verb} {use.name!r} with dim {dim!r}, which there is not{suggest(dim, DIMS)}; known: {', '.join(DIMS)}"
        column = find_column(use.name, self.declared)
        if column is None:
            yield from self._unknown(use, verb)
        elif (use.dtype or column.dtype) != column.dtype or (column.dims if use.dims is None else use.dims) != column.dims:
            yield f"{verb} {str(use)!r}, but {use.name} is {column.type}"

    def _writer(self, node: Node, use: Use) -> Iterator[str]:
        """Finds what a node must read and no node that runs writes, or one does that runs under another condition."""
        writers = [writer for name, found in self.written.items() if use.covers(name) for writer in found if writer is not node]
        if use.name in READY_MADE or use.optional or use.family or node.when is False or not find_column(use.name, self.declared):
            return
        remedy = f"; if it can do without, it reads '{use.name}?'"
        if not writers:
            usual = self.declared[use.name].writer
            yield f"reads {use.name!r}, which no node writes (usually {usual!r} does){remedy}"
        elif all(writer.when is False for writer in writers):
            yield f"reads {use.name!r}, which only {writers[0].name!r} writes, and that does not run here{remedy}"
        elif all(isinstance(writer.when, str) and writer.when != node.when for writer in writers):
            yield f"reads {use.name!r}, which {writers[0].name!r} writes only when {writers[0].when}{remedy}"

    def gathers(self, node: Node) -> Iterator[str]:
        for name in node.gathers:
            column = find_column(name, self.declared)
            if not any(use.covers(name) for use in node.reads):
                yield f"gathers {name!r}, which it does not read{suggest(name, [use.name for use in node.reads])}"
            elif column is not None and column.wide:
                yield f"gathers {name!r}, which is {column.type}: only columns of one number a row may be gathered"

    def after(self, node: Node) -> Iterator[str]:
        names = [other.name for other in self.nodes if other is not node]
        for name in node.after:
            if name not in names:
                yield f"comes after {name!r}, which is no other node{suggest(name, names)}; there are: {', '.join(names)}"

    # -- all of them -------------------------------------------------------------------------------------------------------

    def writers(self) -> Iterator[str]:
        for name, nodes in self.written.items():
            # One of several may write a column where only one of them runs.
            running = [node for node in nodes if node.when is not False]
            if len(running) > 1:
                names = " and ".join(repr(node.name) for node in running)
                yield f"column {name!r} is written by {names}; no column is written twice: give one of them another name"

    def order(self) -> Iterator[str]:
        """Finds cycles, nodes above those they need, and nodes below the one that trains the weights they use."""
        names = [node.name for node in self.nodes]
        nodes = [node for index, node in enumerate(self.nodes) if names.index(node.name) == index]  # edges go by name
        edges = find_edges(nodes)
        before = ancestors(edges)
        position = {node.name: index for index, node in enumerate(nodes)}
        cyclic = {name for name in position if name in before.get(name, ())}
        if cyclic:
            yield f"nodes wait for each other in a circle: {' -> '.join(_circle(edges, cyclic))}"
        for edge in edges:
            if position[edge.source] > position[edge.target] and not {edge.source, edge.target} <= cyclic:
                above, below = repr(edge.target), repr(edge.source)
                yield f"node {above} needs {below} ({edge.label}), which stands below it; put {above} below {below}"
        for node in nodes:
            for trainer in nodes[: position[node.name]]:
                if trainer.trains == node.on and not node.trains and trainer.name not in before.get(node.name, ()):
                    yield (
                        f"node {node.name!r} uses the weights of {node.on} and stands below {trainer.name!r}, which trains them: "
                        f"put it above, or say after={trainer.name!r} if it shall use the new ones"
                    )

    def unused(self) -> Iterator[str]:
        """Finds nodes of whose columns none is read, and columns of the pipeline's own that no node reads.

        A node may write none: its metrics are used.
        """
        uses = [(node.name, use) for node in self.nodes for use in node.reads]
        needed = {name for node in self.nodes for name in node.after}
        for node in self.nodes:
            unread = [
                written.name
                for written in node.writes
                if not any(other != node.name and (use.covers(written.name) or written.covers(use.name)) for other, use in uses)
            ]
            if node.writes and not node.trains and len(unread) == len(node.writes) and node.name not in needed:
                yield f"node {node.name!r} is of no use: no node reads what it writes ({', '.join(unread)}); remove it"
            else:
                own = [name for name in unread if find_column(name, COLUMNS) is None and name in self.declared]
                yield from (f"node {node.name!r} writes {name!r}, which no node reads" for name in own)


def declared_columns(nodes: Sequence[Node]) -> dict[str, StepColumn]:
    """Returns all columns by name: the vocabulary's, and those that the nodes declare."""
    columns = dict(COLUMNS)
    for node in nodes:
        for use in node.writes:
            if use.dtype is not None and use.dims is not None and find_column(use.name, COLUMNS) is None:
                columns.setdefault(use.name, StepColumn(use.name, use.dtype, use.dims, "", node.name))
    return columns


def find_column(name: str, columns: Mapping[str, StepColumn]) -> StepColumn | None:
    """Returns the column of that name, or the family to which it belongs."""
    if name in columns:
        return columns[name]
    return next((column for family, column in columns.items() if family.endswith("*") and name.startswith(family[:-1])), None)


def _circle(edges: Sequence[Edge], cyclic: set[str]) -> list[str]:
    """Returns the names along one circle, its first node at both ends."""
    path = [next(edge.target for edge in edges if edge.target in cyclic)]
    while path[-1] not in path[:-1]:
        path.append(next(edge.source for edge in edges if edge.target == path[-1] and edge.source in cyclic))
    circle = path[path.index(path[-1]) :]
    return circle[::-1]


@cache
def methods_of(target: str, every: bool = False) -> set[str] | None:
    """Returns the methods that a step may call of a class "module:Class": the registered ones of workers, every public one of
    the driver, those of base classes too.  None where the source cannot be read."""
    source, name = source_of(target)
    if source is None or source.problem is not None:
        return None
    definition = source.definition(name)
    if not isinstance(definition, ast.ClassDef):
        return None
    bases = [ast.unparse(base) for base in definition.bases]
    found = {
        item.name
        for item in definition.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        and (every and not item.name.startswith("_") or any(map(_registers, item.decorator_list)))
    }
    module = target.rpartition(":")[0]
    origins = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in source.body
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    for base in bases:
        here = base if source.definition(base) is not None else None
        inherited = methods_of(f"{module}:{here}" if here else origins[base], every) if here or base in origins else set()
        found |= inherited or set()
    return found


def _registers(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).split(".")[-1] == "register"
