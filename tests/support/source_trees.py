"""The package's syntax trees as the tests of its source read them: every file is parsed once and walked once a process."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhub"

Node = TypeVar("Node", bound=ast.AST)


@cache
def sources() -> dict[str, str]:
    """Path relative to the package -> text."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """Path relative to the package -> syntax tree."""
    return {path: ast.parse(text, str(PACKAGE / path)) for path, text in sources().items()}


@cache
def _by_type(tree: ast.AST) -> dict[type[ast.AST], list[ast.AST]]:
    found: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    for node in ast.walk(tree):
        found[type(node)].append(node)
    return found


def nodes(tree: ast.AST, *kinds: type[Node]) -> list[Node]:
    """All nodes of these kinds at any depth."""
    return [node for kind in kinds for node in _by_type(tree).get(kind, ())]  # type: ignore[misc]
