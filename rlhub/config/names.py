"""Checks of the names in a configuration: registered parts, and classes and functions of the user's own.

Users name the latter as `path/to/file.py:name` or `package.module:name`; their source is parsed and not run.
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
"""Stands in `Source.names` for names that are known only after the file was run."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def unknown(key: str, registry: Registry[Any], name: str) -> list[str]:
    """Returns the problem of a setting that must be a registered name; [] if it is one."""
    try:
        registry.row(name)
    except RegistryError as error:
        return [f"{key}: {error}"]
    return []


@dataclass(slots=True, kw_only=True)
class Source:
    """The parsed source of a file.

    place: file or module as the user named it.  body: statements at its top level.  problem: the reason why the file could not
    be read or parsed, or None.
    """

    place: str
    body: Sequence[ast.stmt] = ()
    problem: str | None = None

    @property
    def names(self) -> set[str]:
        """The names that the file binds at its top level; ANYTHING among them where that cannot be told."""
        return {name for node in self.body for name in _names_bound_by(node)}

    def definition(self, name: str) -> Definition | None:
        """Returns the function or class of the name, or None where the file defines it not at all or more than once."""
        found = [node for node in self.body if isinstance(node, Definition) and node.name == name]
        return found[0] if len(found) == 1 else None

    def lacks(self, name: str) -> str | None:
        """Returns the message that the file lacks the name, with the names it has; None where it has the name."""
        names = self.names
        if name in names or ANYTHING in names:
            return None
        own = sorted(node.name for node in self.body if isinstance(node, Definition) and not node.name.startswith("_"))
        there = ", ".join(own or sorted(names)) or "nothing"
        return f"not defined in {self.place}, which has: {there}{suggest(name, own or names)}"


def read_source(path: str | Path) -> Source:
    """Reads and parses a Python file."""
    file = Path(path).expanduser()
    if not file.is_file():
        return Source(place=str(path), problem=f"no such file (looked for {file.resolve()})")
    try:
        return Source(place=str(path), body=ast.parse(file.read_text(encoding="utf-8"), str(file)).body)
    except (SyntaxError, ValueError, OSError) as error:  # ValueError: bytes that are no text
        return Source(place=str(path), problem=f"not a Python file: {error}")


def source_of(target: str) -> tuple[Source | None, str]:
    """Returns (source, name in it) of a target; the source is None where the module is no Python file."""
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
    """Returns the reason why the target of a setting cannot be found; [] if it is found or cannot be checked."""
    source, name = source_of(target)
    if source is None:
        return []
    wrong = source.problem or source.lacks(name.partition(".")[0])
    return [f"{key}={target}: {wrong}"] if wrong else []


def settings_problems(key: str, target: str, settings: Mapping[str, Any], *, complete: bool = True) -> list[str]:
    """Returns the problems of a target's keyword arguments: settings that it does not take, and required ones that are missing.

    complete: the target gets no other arguments, so that missing ones are a problem.
    """
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
    """The parameters of a function.

    known: those that may be given by keyword; required: those that must be given; takes_any: it takes any other keyword too.
    """

    known: list[str]
    required: list[str]
    takes_any: bool


def _parameters(node: Definition) -> _Parameters | None:
    """Returns the definition's parameters, or None where a base class or a decorator defines them."""
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
