"""Prints the figures of the package's shape: files, importers, functions, names and docstrings, with the bound on each.

    python scripts/checks/house.py [--list FIGURE]      # exit status 1 where a bound does not hold

Lines are physical ones and `__init__.py` files are not counted as files.  An importer of a module is another file of the package
that imports it (at any depth, under TYPE_CHECKING too), takes one of its names through a package's `__init__`, or names it in
a registry's lazy row ("rlhub.x.y:attr") or in the text of a program that it starts.  A registered part, which a lazy row names,
is a file of its own by the rule "one file and one registration" and may have that one importer.  Small files are those under 60
lines outside the folders whose rule is one algorithm a file.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL_LINES, LARGE_LINES = 60, 500
ONE_ALGORITHM_A_FILE = ("algorithms/advantages/", "algorithms/policy_losses/")
LAZY_ROW = re.compile(r"rlhub(\.\w+)+:\w+")
PROGRAM = re.compile(r"\bfrom (rlhub(?:\.\w+)+) import \w")


@dataclass(slots=True, kw_only=True, frozen=True)
class Bound:
    """holds: whether a value is within it.  text: how it is printed."""

    holds: Callable[[float], bool]
    text: str


def at_most(limit: float) -> Bound:
    return Bound(holds=lambda value: value <= limit, text=f"at most {limit:g}")


def at_least(limit: float) -> Bound:
    return Bound(holds=lambda value: value >= limit, text=f"at least {limit:g}")


BOUNDS: dict[str, Bound] = {
    "files": at_most(390),
    "median lines of a file": at_least(110),
    "small files, %": at_most(15),
    "large files": at_most(0),
    "modules with one importer, %": at_most(15),
    "unregistered ones of these, %": at_most(10),
    "import cycles": at_most(0),
    "classes of one name": at_most(5),
    "docstrings beginning with Of": at_most(0),
    "functions, median lines": at_most(6),
    "functions, p99 lines": at_most(30),
    "README lines": at_most(159),
}


@dataclass(slots=True)
class House:
    """The package as a mapping of module name to source, and what is counted in it.  README: its number of lines."""

    modules: Mapping[str, str]
    readme_lines: int = 0
    trees: dict[str, ast.Module] = field(init=False)
    importers: dict[str, set[str]] = field(init=False)
    registered: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.trees = {name: ast.parse(text) for name, text in self.modules.items()}
        self.importers = defaultdict(set)
        for name in self.trees:
            for imported in self.imports(name):
                self.importers[imported].add(name)
        rows = (text for name in self.trees for text in self.strings(name) if LAZY_ROW.fullmatch(text))
        self.registered = {row.partition(":")[0] for row in rows}

    def imports(self, name: str, *, lazy: bool = True) -> Iterator[str]:
        """The modules that this one imports; a name taken through a package's `__init__` counts as its module too.

        lazy: the modules of its registry's lazy rows as well.
        """
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.trees)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield from (found for found in self.origins(node.module, alias.name) if found != name)
        for text in self.strings(name) if lazy else ():
            named = [text.partition(":")[0]] if LAZY_ROW.fullmatch(text) else PROGRAM.findall(text)
            yield from (module for module in named if module in self.trees)

    def strings(self, name: str) -> Iterator[str]:
        """Yields the texts in a module's code; docstrings only tell."""
        docstrings = {id(node.value) for node in ast.walk(self.trees[name]) if isinstance(node, ast.Expr)}
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value

    def origins(self, module: str, attribute: str) -> Iterator[str]:
        """The modules that `from module import attribute` reads."""
        if f"{module}.{attribute}" in self.trees:
            yield f"{module}.{attribute}"
        elif module in self.trees:
            yield module
            if self.is_package(module):
                for node in self.trees[module].body:
                    if isinstance(node, ast.ImportFrom) and node.module and any(a.name == attribute for a in node.names):
                        yield from self.origins(node.module, attribute)

    def is_package(self, name: str) -> bool:
        return any(other.startswith(f"{name}.") for other in self.trees)

    @property
    def files(self) -> list[str]:
        return sorted(name for name in self.modules if not self.is_package(name))

    def num_lines(self, name: str) -> int:
        return self.modules[name].count("\n")

    def small(self) -> list[str]:
        return [name for name in self.counted_small() if self.num_lines(name) < SMALL_LINES]

    def counted_small(self) -> list[str]:
        return [name for name in self.files if not path(name).startswith(ONE_ALGORITHM_A_FILE)]

    def large(self) -> list[str]:
        return [name for name in self.files if self.num_lines(name) > LARGE_LINES]

    def one_importer(self) -> list[str]:
        """Returns the files that only one other imports, registered parts too."""
        return [name for name in self.files if len(self.importers[name]) == 1]

    def unregistered(self) -> list[str]:
        """Returns the files that only one other imports, and that are no registered parts."""
        return [name for name in self.one_importer() if name not in self.registered]

    def same_names(self) -> list[str]:
        """`Name: module, module` for each public or private class that stands in several modules."""
        places: dict[str, list[str]] = defaultdict(list)
        for name, tree in sorted(self.trees.items()):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(name)
        return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]

    def docstrings(self) -> Iterator[tuple[str, int, str]]:
        """(module, line, text) of every docstring, those under a field or constant included."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                for item in body if isinstance(body, list) else ():
                    if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str):
                        yield name, item.lineno, item.value.value

    def of_docstrings(self) -> list[str]:
        return [
            f"{name}:{line}: {text.strip()[:80]}" for name, line, text in self.docstrings() if text.lstrip().startswith("Of ")
        ]

    def function_lines(self) -> list[int]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = (node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, kinds))
        return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found]

    def cycles(self) -> list[str]:
        """Files that import each other, directly or around a corner: the strongly connected parts of the import graph."""
        edges = {name: {other for other in self.imports(name, lazy=False) if not self.is_package(other)} for name in self.files}
        return [" <-> ".join(sorted(part)) for part in strongly_connected(edges) if len(part) > 1]


def strongly_connected(edges: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Tarjan's algorithm (SIAM Journal on Computing 1, 1972), without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    parts: list[set[str]] = []
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(edges.get(other, ()))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    parts.append(set(stack[cut:]))
                    on_stack -= parts[-1]
                    del stack[cut:]
    return parts


def path(name: str) -> str:
    """`rlhub.config.load` -> config/load.py"""
    return "/".join(name.split(".")[1:]) + ".py"


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that is at least as large as this share of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def read_house(root: Path = ROOT) -> House:
    """The package in the source tree at `root`."""
    found = {}
    for file in sorted((root / "rlhub").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    readme = root / "README.md"
    return House(found, readme.read_text().count("\n") if readme.is_file() else 0)


def figures(house: House) -> dict[str, float]:
    """The value of each figure that has a bound."""
    lines = [house.num_lines(name) for name in house.files]
    functions = house.function_lines()
    return {
        "files": len(lines),
        "median lines of a file": statistics.median(lines),
        "small files, %": 100 * len(house.small()) / len(house.counted_small()),
        "large files": len(house.large()),
        "modules with one importer, %": 100 * len(house.one_importer()) / len(lines),
        "unregistered ones of these, %": 100 * len(house.unregistered()) / len(lines),
        "import cycles": len(house.cycles()),
        "classes of one name": len(house.same_names()),
        "docstrings beginning with Of": len(house.of_docstrings()),
        "functions, median lines": statistics.median(functions),
        "functions, p99 lines": percentile(functions, 0.99),
        "README lines": house.readme_lines,
    }


LISTS: dict[str, Callable[[House], list[str]]] = {
    "small": lambda house: [f"{house.num_lines(name):4d} {name}" for name in house.small()],
    "large": House.large,
    "one-importer": lambda house: [f"{name} <- {next(iter(house.importers[name]))}" for name in house.one_importer()],
    "cycles": House.cycles,
    "same-names": House.same_names,
    "of": House.of_docstrings,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=sorted(LISTS), help="print the places behind one figure instead")
    args = parser.parse_args()
    house = read_house()
    if args.list:
        sys.stdout.write("".join(f"{line}\n" for line in LISTS[args.list](house)))
        return 0
    found = figures(house)
    for name, value in found.items():
        mark = "" if BOUNDS[name].holds(value) else "   <- not within"
        sys.stdout.write(f"{name:32}{value:8.1f}   {BOUNDS[name].text}{mark}\n")
    return 0 if all(BOUNDS[name].holds(value) for name, value in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
