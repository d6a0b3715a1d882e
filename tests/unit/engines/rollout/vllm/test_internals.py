"""vLLM's internals: one module uses them, it lists all it uses, and the installed vLLM has them.

Both sides are read as sources, for importing vLLM takes seconds and changes the process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.source_trees import nodes, trees

MODULE = "engines/rollout/vllm/internals.py"


def listed() -> dict[str, str]:
    """The table of the module."""
    for assignment in nodes(trees()[MODULE], ast.Assign):
        if ast.unparse(assignment.targets[0]) == "INTERNALS":
            return dict(ast.literal_eval(assignment.value))
    raise AssertionError(f"{MODULE} has no table INTERNALS")


# --- the installed vLLM has them --------------------------------------------------------------------------------------------


def installed() -> Path | None:
    """The folder of the installed package."""
    spec = find_spec("vllm")
    return None if spec is None or not spec.submodule_search_locations else Path(spec.submodule_search_locations[0])


def has(folder: Path, name: str) -> bool:
    """Whether the sources define `module:name` or `module:Class.attribute`, as a method or as an attribute of its objects."""
    module, _, path = name.partition(":")
    file = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not file.is_file():
        return False
    scope: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for part in path.split("."):
        found = next((node for node in ast.walk(scope) if defines(node, part)), None)
        if found is None:
            return False
        scope = found
    return True


def defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(ast.unparse(target) in (name, f"self.{name}") for target in targets)


def missing(folder: Path, names: Mapping[str, str]) -> list[str]:
    """A sentence for each name that is not there."""
    number = version(packages_distributions()["vllm"][0])
    return [
        f"vLLM {number} has no {name}, which rlhub needs ({why}): mend rlhub/{MODULE}"
        for name, why in names.items()
        if not has(folder, name)
    ]


@pytest.fixture
def folder() -> Path:
    found = installed()
    if found is None:
        pytest.skip("vLLM is not installed")
    return found


def test_the_installed_vllm_has_every_internal(folder: Path) -> None:
    assert not missing(folder, listed()), "\n" + "\n".join(missing(folder, listed()))


@pytest.mark.parametrize(
    "name",
    [
        "vllm.v1.engine.llm_engine:LLMEngine.made_up",
        "vllm.v1.engine.made_up:LLMEngine",
        "vllm.v1.engine.llm_engine:MadeUp.step",
        "vllm._custom_ops:_made_up",
    ],
)
def test_a_missing_internal_is_named(folder: Path, name: str) -> None:
    (sentence,) = missing(folder, {**listed(), name: "to see this sentence"})
    assert name in sentence and "to see this sentence" in sentence and MODULE in sentence


# --- one module uses them, and lists all --------------------------------------------------------------------------------------


def is_internal(name: str) -> bool:
    """Whether the dotted name is one that vLLM does not promise to keep."""
    parts = name.split(".")
    return parts[0] == "vllm" and ("v1" in parts or any(part.startswith("_") for part in parts))


def imports(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree, ast.Import):
        yield from (alias.name for alias in node.names)
    for origin in nodes(tree, ast.ImportFrom):
        yield from (f"{origin.module}.{alias.name}" for alias in origin.names)


def uses(tree: ast.Module, attributes: frozenset[str]) -> list[str]:
    """Internals that the source imports, and `attributes` that it reads or writes."""
    found = [name for name in imports(tree) if is_internal(name)]
    return found + [node.attr for node in nodes(tree, ast.Attribute) if node.attr in attributes]


ATTRIBUTES = frozenset(name.split(":")[1].split(".")[-1] for name in listed()) | {"scheduler"}


def test_no_other_module_uses_internals() -> None:
    ours = {path: tree for path, tree in trees().items() if path.startswith("engines/rollout/vllm/") and path != MODULE}
    assert len(ours) > 5
    assert {path: found for path, tree in ours.items() if (found := uses(tree, ATTRIBUTES))} == {}
    others = {path: tree for path, tree in trees().items() if path != MODULE}
    assert {path: found for path, tree in others.items() if (found := uses(tree, frozenset()))} == {}


def test_the_module_lists_what_it_uses() -> None:
    names = {name.replace(":", ".") for name in listed()}
    tree = trees()[MODULE]
    unlisted = [
        name for name in imports(tree) if is_internal(name) and not any(f"{known}.".startswith(f"{name}.") for known in names)
    ]
    private = {node.attr for node in nodes(tree, ast.Attribute) if node.attr.startswith("_")}
    assert not unlisted and private <= ATTRIBUTES


def test_a_use_elsewhere_is_found() -> None:
    for source in (
        "from vllm.v1.engine.core import EngineCore",
        "import vllm._custom_ops",
        "from vllm import _custom_ops",
        "llm.llm_engine.engine_core.engine_core.scheduler.requests",
    ):
        assert uses(ast.parse(source), ATTRIBUTES), source
    assert not uses(ast.parse("from vllm import LLM\nLLM().llm_engine.step()"), ATTRIBUTES)


@pytest.mark.parametrize("newer", [True, False])
def test_an_engine_core_without_a_finalizer_is_left_alone(newer: bool) -> None:
    """That of vLLM 0.26 has none.  The function is taken out of its source, because its module imports vLLM."""
    (function,) = (node for node in nodes(trees()[MODULE], ast.FunctionDef) if node.name == "spare_process_group")
    scope: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + ast.unparse(function), scope)
    detached: list[bool] = []
    finalizer = {"_finalizer": SimpleNamespace(detach=lambda: detached.append(True))} if newer else {}
    scope["spare_process_group"](SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(**finalizer))))
    assert detached == [True] * newer
