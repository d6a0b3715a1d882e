"""What is wrong with what users name, before any process starts: registered parts, and what they name by where it stands
(`path/to/file.py:name`, `package.module:name`), whose source is read and not run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhub.errors import RegistryError
from rlhub.registry import Registry, suggest

ANYTHING = "*"
"""Stands for names that only running the file would tell."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def unknown(key: str, registry: Registry[Any], name: str) -> list[str]:
    """What is wrong with a setting that must be a registered name; [] if nothing."""
    try:
        registry.row(name)
    except RegistryError as error:
        return [f"{key}: {error}"]
    return []


@dataclass(slots=True, kw_only=True)
class Source:
    """A file that was read.  problem: why it could not be, or None.  names: bound at its top level."""

    place: str
    body: Sequence[ast.stmt] = ()
    problem: str | None = None

    @property
    def names(self) -> set[str]:
        return {name for node in self.body for name in _names_bound_by(node)}

    def definition(self, name: str) -> Definition | None:
        """What the file itself defines under the name, where that can be told: the only definition of it."""
        found = [node for node in self.body if isinstance(node, Definition) and node.name == name]
        return found[0] if len(found) == 1 else None

    def lacks(self, name: str) -> str | None:
        """That the file has no such name, with those it has."""
        names = self.names
        if name in names or ANYTHING in names:
            return None
        own = sorted(node.name for node in self.body if isinstance(node, Definition) and not node.name.startswith("_"))
        there = ", ".join(own or sorted(names)) or "nothing"
        return f"not defined in {self.place}, which has: {there}{suggest(name, own or names)}"


def read_source(path: str | Path) -> Source:
    """A file of Python, which is parsed."""
    file = Path(path).expanduser()
    if not file.is_file():
        return Source(place=str(path), problem=f"no such file (looked for {file.resolve()})")
    try:
        return Source(place=str(path), body=ast.parse(file.read_text(encoding="utf-8"), str(file)).body)
    except (SyntaxError, ValueError, OSError) as error:  # ValueError: bytes that are no text
        return Source(place=str(path), problem=f"not a Python file: {error}")


def source_of(target: str) -> tuple[Source | None, str]:
    """(the source, the name in it) of a target; None where the module is no file of Python that could be read."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        return Source(place=target, problem="neither 'module:name' nor 'path/to/file.py:name'"), name
    if where.endswith(".py"):
        return read_source(where), name
    try:
        spec = find_spec(where)
    except (ImportError, ValueError):  # of the package it is in; of a name that cannot be a module's
        spec = None
    if spec is None:
        return Source(place=where, problem=f"no module {where!r}; is its folder on PYTHONPATH?"), name
    return (read_source(spec.origin) if spec.origin and spec.origin.endswith(".py") else None), name


def target_problems(key: str, target: str) -> list[str]:
    """What keeps the target of this setting from being found; [] if nothing is seen."""
    source, name = source_of(target)
    if source is None:
        return []
    wrong = source.problem or source.lacks(name.partition(".")[0])
    return [f"{key}={target}: {wrong}"] if wrong else []


def settings_problems(key: str, target: str, settings: Mapping[str, Any], *, complete: bool = True) -> list[str]:
    """Keywords that the target does not take, and, where it gets no others (`complete`), those it cannot do without."""
    source, name = source_of(target)
    node = source.definition(name) if source is not None else None
    parameters = _parameters(node) if node is not None else None
    if parameters is None:
        return []
    unknown = [] if parameters.takes_any else [name for name in settings if name not in parameters.known]
    known, required = parameters.known, parameters.required
    there = f"{target} takes {', '.join(known) or 'none'}"
    found = [f"{key}.{name}: no such setting{suggest(name, known)}; {there}" for name in unknown]
    missing = [name for name in required if name not in settings] if complete else []
    return found + ([f"{key}: {target} needs {', '.join(missing)}, not set; {there}"] if missing else [])


@dataclass(slots=True, kw_only=True)
class _Parameters:
    """known: what may be given by keyword; required: of these what must; takes_any: so is any other."""

    known: list[str]
    required: list[str]
    takes_any: bool


def _parameters(node: Definition) -> _Parameters | None:
    """None where they stand elsewhere: in a base class, or in what a decorator makes of it."""
    maker: ast.stmt | None = node
    if isinstance(node, ast.ClassDef):
        maker = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if not isinstance(maker, ast.FunctionDef | ast.AsyncFunctionDef) or maker.decorator_list:
        return None
    arguments, skip = maker.args, 1 if isinstance(node, ast.ClassDef) else 0
    by_position = [item.arg for item in [*arguments.posonlyargs, *arguments.args]][skip:]
    required = by_position[: len(by_position) - len(arguments.defaults)]
    by_keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [item.arg for item, default in by_keyword if default is None]
    known = [*by_position[max(len(arguments.posonlyargs) - skip, 0) :], *(item.arg for item in arguments.kwonlyargs)]
    return _Parameters(known=known, required=required, takes_any=arguments.kwarg is not None)


def _names_bound_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Definition):
        yield ANYTHING if node.name == "__getattr__" else node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((name.asname or name.name).partition(".")[0] for name in node.names)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While | ast.Match | ast.TryStar):
        yield ANYTHING
