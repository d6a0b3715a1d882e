"""The architecture, held by reading the source: layers, cycles, forbidden imports, sizes, and what a light process may load.

A finding names file and line.  Waivers are in this file, each with its reason; an unused waiver is a failure too.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator

import pytest

from scripts.checks.house import strongly_connected
from tests.support.source_trees import ROOT, nodes, sources, trees

# Low to high.  A unit imports itself and lower rows only; units of one row do not see each other.
# errors stands below utils, for helpers raise the errors of the one exception tree, which itself needs nothing.
ROWS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"utils"}),
    frozenset({"registry"}),
    frozenset({"config", "protocol"}),
    frozenset({"algorithms", "single_controller", "sandboxes"}),
    frozenset({"models", "data", "rewards", "tools", "envs", "tracking", "checkpoint"}),
    frozenset({"engines"}),
    frozenset({"sharding_manager"}),
    frozenset({"workers"}),
    frozenset({"agents"}),
    frozenset({"rollout_service"}),
    frozenset({"pipeline"}),
    frozenset({"trainer"}),
)
LEVEL = {unit: level for level, row in enumerate(ROWS) for unit in row}

# (folder or file under rlhub/, modules it must not import directly, why)
FORBIDDEN: tuple[tuple[str, frozenset[str], str], ...] = (
    (
        "algorithms",
        frozenset({"ray", "vllm", "megatron", "transformers", "torch.distributed"}),
        "algorithms are pure functions of tensors",
    ),
    (
        "trainer",
        frozenset({"vllm", "megatron", "transformers", "torch.distributed"}),
        "the controller owns no device and no model",
    ),
    ("config", frozenset({"torch", "ray", "transformers", "vllm"}), "--help and the checks before start load nothing heavy"),
    ("registry.py", frozenset({"torch", "ray"}), "names are known without loading parts"),
    ("errors.py", frozenset({"torch", "ray"}), "errors are importable anywhere"),
)
RAY_ONLY_IN = "single_controller/ray"

LATER = ("TO" + "DO", "FIX" + "ME", "XX" + "X")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8

# path (and ::function) -> why it may break the rule
SIZE_WAIVERS: dict[str, str] = {}
LAYER_WAIVERS: dict[str, str] = {}
PARAMETER_WAIVERS: dict[str, str] = {
    "config/cli.py::run": "the parts of a command, which each main puts together in one line",
    "engines/training/fsdp/engine.py::__init__": "the parts of an engine, which its factory alone puts together",
    "engines/training/megatron/engine.py::__init__": "the parts of an engine, which its factory alone puts together",
    "models/packed_attention.py::packed_attention": "the signature of transformers' attention functions",
    "rollout_service/executor/executor.py::__init__": "the parts of the executor, which its builder alone puts together",
}


def unit_of(path: str) -> str:
    """`config/load.py` -> config; `errors.py` -> errors; `__init__.py` -> the package itself."""
    return path.partition("/")[0].removesuffix(".py")


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import at any depth, names imported `from` a package included.

    Imports under `if TYPE_CHECKING` count too: who needs another's types depends on it.
    """
    package = ["rlhub", *path.split("/")[:-1]]
    for node in nodes(tree, ast.Import):
        for name in node.names:
            yield node.lineno, name.name
    for origin in nodes(tree, ast.ImportFrom):
        base = ".".join(package[: len(package) - origin.level + 1]) if origin.level else ""
        module = ".".join(part for part in (base, origin.module or "") if part)
        for name in origin.names:
            yield origin.lineno, f"{module}.{name.name}"


def layer_violations(files: dict[str, ast.Module]) -> dict[str, str]:
    """`path:unit` -> sentence, for each import that goes up or sideways."""
    found = {}
    for path, tree in files.items():
        unit = unit_of(path)
        if unit == "__init__":
            continue
        if unit not in LEVEL:
            found[f"{path}:?"] = f"rlhub/{path}: {unit!r} is in no row of the layers"
            continue
        for line, name in imports(path, tree):
            parts = name.split(".")
            if parts[0] != "rlhub" or len(parts) < 2 or parts[1] == unit or parts[1] == "__version__":
                continue
            if parts[1] not in LEVEL or LEVEL[parts[1]] >= LEVEL[unit]:
                found[f"{path}:{parts[1]}"] = f"rlhub/{path}:{line}: {unit} must not import {parts[1]}"
    return found


def starts_with(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def forbidden_imports(files: dict[str, ast.Module]) -> list[str]:
    """Sentences on imports of outside packages in places that must not have them."""
    found = []
    for path, tree in files.items():
        for line, name in imports(path, tree):
            if starts_with(name, "ray") and not path.startswith(f"{RAY_ONLY_IN}/"):
                found.append(f"rlhub/{path}:{line}: imports ray; only rlhub/{RAY_ONLY_IN} may")
            for place, modules, why in FORBIDDEN:
                if path == place or path.startswith(f"{place}/"):
                    found += [f"rlhub/{path}:{line}: imports {name}: {why}" for module in modules if starts_with(name, module)]
    return found


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [*nodes(tree, ast.FunctionDef), *nodes(tree, ast.AsyncFunctionDef)]


def oversized(files: dict[str, ast.Module], sources: dict[str, str]) -> dict[str, str]:
    """`path` or `path::function` -> sentence, for what is too long."""
    found = {}
    for path, tree in files.items():
        lines = sources[path].count("\n")
        if lines > MAX_FILE_LINES:
            found[path] = f"rlhub/{path}: {lines} lines, at most {MAX_FILE_LINES}"
        for node in functions(tree):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found[f"{path}::{node.name}"] = f"rlhub/{path}:{node.lineno}: {node.name} has {length} lines"
    return found


def overlong_signatures(files: dict[str, ast.Module]) -> dict[str, str]:
    """`path::function` -> sentence, for functions with too many parameters (`self` and `cls` aside)."""
    found = {}
    for path, tree in files.items():
        for node in functions(tree):
            spec = node.args
            every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
            count = sum(parameter.arg not in ("self", "cls") for parameter in every)
            if count > MAX_PARAMETERS:
                where = f"rlhub/{path}:{node.lineno}"
                found[f"{path}::{node.name}"] = f"{where}: {node.name} has {count} parameters; make them a dataclass"
    return found


def untidy(files: dict[str, ast.Module], sources: dict[str, str]) -> list[str]:
    """Prints, work left for later, attribute guards and swallowed exceptions."""
    found = []
    for path, tree in files.items():
        for node in nodes(tree, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("print", "hasattr"):
                found.append(f"rlhub/{path}:{node.lineno}: {node.func.id}()")
        found += [f"rlhub/{path}:{node.lineno}: bare except" for node in nodes(tree, ast.ExceptHandler) if node.type is None]
        if not any(word in sources[path] for word in LATER):
            continue
        for token in tokenize.generate_tokens(io.StringIO(sources[path]).readline):
            if token.type == tokenize.COMMENT and any(word in token.string for word in LATER):
                found.append(f"rlhub/{path}:{token.start[0]}: {token.string}")
    return found


def unannotated(files: dict[str, ast.Module]) -> list[str]:
    """Functions with an argument or result without a type (lambdas and `self` aside)."""
    found = []
    for path, tree in files.items():
        for node in functions(tree):
            spec = node.args
            arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
            bare = [argument.arg for argument in arguments if argument.annotation is None and argument.arg not in ("self", "cls")]
            if bare or (node.returns is None and node.name != "__init__"):
                found.append(f"rlhub/{path}:{node.lineno}: {node.name} is not fully annotated {bare}")
    return found


def import_cycles(files: dict[str, ast.Module]) -> list[str]:
    """Groups of units that import each other, directly or around a corner (the waived imports included)."""
    edges: dict[str, set[str]] = {}
    for path, tree in files.items():
        if unit_of(path) in LEVEL:
            names = (name.split(".") for _, name in imports(path, tree))
            edges.setdefault(unit_of(path), set()).update(
                parts[1] for parts in names if parts[0] == "rlhub" and len(parts) > 1 and parts[1] in LEVEL
            )

    def reach(unit: str) -> set[str]:
        seen: set[str] = set()
        stack = [unit]
        while stack:
            for other in edges.get(stack.pop(), set()) - seen - {unit}:
                seen.add(other)
                stack.append(other)
        return seen

    reachable = {unit: reach(unit) for unit in edges}
    return sorted({" <-> ".join(sorted((a, b))) for a in edges for b in reachable[a] if a in reachable.get(b, set())})


def file_cycles(files: dict[str, ast.Module]) -> list[str]:
    """Groups of files that import each other, directly or around a corner, at any depth and under TYPE_CHECKING too."""
    paths = {"rlhub." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}

    def imported(path: str) -> set[str]:
        names = [name for _, name in imports(path, files[path])]  # `from package import name`: the module of that name, if any
        found = {paths.get(name) or paths.get(name.rpartition(".")[0]) for name in names}
        return {other for other in found if other is not None and other != path}

    parts = strongly_connected({path: imported(path) for path in files})
    return sorted(" <-> ".join(sorted(part)) for part in parts if len(part) > 1)


def report(findings: list[str]) -> str:
    return "\n" + "\n".join(findings)


# --- the rules, on the package -----------------------------------------------------------------------------------------


def test_imports_go_down_the_layers() -> None:
    found = layer_violations(trees())
    problems = [text for key, text in found.items() if key not in LAYER_WAIVERS]
    assert not problems, report(problems)
    assert not LAYER_WAIVERS.keys() - found.keys(), "waivers nobody needs any more"


def test_units_form_no_cycle() -> None:
    assert not import_cycles(trees())


def test_files_form_no_cycle() -> None:
    found = file_cycles(trees())
    assert not found, report(found)


def test_outside_packages_stay_in_their_places() -> None:
    found = forbidden_imports(trees())
    assert not found, report(found)


def test_files_and_functions_are_short() -> None:
    found = oversized(trees(), sources())
    problems = [text for key, text in found.items() if key not in SIZE_WAIVERS]
    assert not problems, report(problems)
    assert not SIZE_WAIVERS.keys() - found.keys(), "waivers nobody needs any more"


def test_signatures_are_short() -> None:
    found = overlong_signatures(trees())
    problems = [text for key, text in found.items() if key not in PARAMETER_WAIVERS]
    assert not problems, report(problems)
    assert not PARAMETER_WAIVERS.keys() - found.keys(), "waivers nobody needs any more"


def test_nothing_is_left_lying_about() -> None:
    found = untidy(trees(), sources())
    assert not found, report(found)


def test_every_function_is_annotated() -> None:
    found = unannotated(trees())
    assert not found, report(found)


def test_top_level_is_what_is_documented() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        names = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
        names -= {"build", "dist", "checkpoints", "outputs", "wandb", "rlhub.egg-info", "__pycache__"}
    else:
        names = {line.partition("/")[0] for line in tracked.stdout.splitlines() if "/" in line and line[0] != "."}
    assert names <= {"rlhub", "trainer_configs", "recipes", "tests", "docker", "scripts"}


# --- what a light process loads ------------------------------------------------------------------------------------------

HEAVY = ("torch", "ray", "transformers", "vllm", "tensordict", "hydra", "pyarrow")


ALONE = f"""
import os, sys
for number, statement in enumerate(sys.argv[1:]):
    if os.fork() == 0:  # each in a process of its own, of which one alone had to be started
        exec(statement)
        found = [name for name in {HEAVY!r} if name in sys.modules]
        sys.stderr.write(f"\\nloaded {{number}} {{' '.join(found)}}\\n")
        sys.stderr.flush()
        os._exit(0)
    assert os.wait()[1] == 0, statement
"""


def loaded_by(*statements: str) -> dict[str, set[str]]:
    """Which heavy packages a fresh interpreter has loaded after each of `statements`, alone; those that load any."""
    command = [sys.executable, "-c", ALONE, *statements]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("loaded ")]
    assert [int(number) for number, *_ in said] == list(range(len(statements)))
    return {statements[int(number)]: set(found) for number, *found in said if found}


def help_of(main: str) -> str:
    run = f"sys.argv = ['{main}', '--help']\ntry: runpy.run_module('rlhub.trainer.{main}', run_name='__main__')"
    return f"import runpy\n{run}\nexcept SystemExit as stop: assert not stop.code, stop.code"


LIGHT = (
    "rlhub",
    "rlhub.errors",
    "rlhub.registry",
    "rlhub.config.cli",
    "rlhub.config.sections.ppo",
    "rlhub.config.sections.sft",
    "rlhub.config.sections.preference",
    "rlhub.config.sections.preference",
    "rlhub.algorithms.registry",
    "rlhub.engines.rollout.registry",
    "rlhub.rewards.registry",
    "rlhub.tracking.recorder",
    "rlhub.models.shape",
    "rlhub.pipeline.builtin",
    "rlhub.pipeline.load",
    "rlhub.pipeline.show",
)
MAINS = ("main_ppo", "main_sft", "main_dpo", "main_rm", "main_eval", "main_export")


def test_importing_loads_nothing_heavy() -> None:
    assert loaded_by(*(f"import {module}" for module in LIGHT)) == {}


def test_preflight_loads_only_what_reads_files() -> None:
    statement = "import rlhub.trainer.preflight.checks"
    assert loaded_by(statement).get(statement, set()) <= {"pyarrow"}


def test_help_loads_nothing_heavy() -> None:
    assert loaded_by(*map(help_of, MAINS)) == {}


ONE_ALGORITHM_A_FILE = ("rlhub/algorithms/advantages", "rlhub/algorithms/policy_losses")


def unmapped(package: str, docstring: str, names: list[str]) -> list[str]:
    """Returns the files and folders of a package that its docstring, the map of the folder, does not name."""
    named = {word.strip("/,;:.()") for word in docstring.replace(".py", "").replace("main_*", "main").split()}
    return [f"{package}: {name}" for name in names if name not in named and not name.startswith("main_")]


def test_the_docstring_of_every_package_maps_it() -> None:
    found: list[str] = []
    for file in sorted((ROOT / "rlhub").rglob("__init__.py")):
        folder = file.parent
        package = folder.relative_to(ROOT).as_posix()
        names = [item.stem for item in sorted(folder.glob("*.py")) if item != file]
        names += [item.parent.name for item in sorted(folder.glob("*/__init__.py"))]
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert docstring, f"{package} has no docstring"
        found += [] if package in ONE_ALGORITHM_A_FILE else unmapped(package, docstring, names)
    assert found == []


def test_a_file_that_no_map_names_is_found() -> None:
    assert unmapped("rlhub/x", "Things.\n\nkept.py  what is kept\nsub/  more", ["kept", "sub", "lost"]) == ["rlhub/x: lost"]


# --- controls: each rule finds the fault it is there for -------------------------------------------------------------------


def parsed(**files: str) -> dict[str, ast.Module]:
    return {name.replace("__", "/") + ".py": ast.parse(text) for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"algorithms__x": "from rlhub.data.rows import load"}, "algorithms must not import data"),
        ({"data__x": "def f():\n    import rlhub.rewards.pool"}, "data must not import rewards"),
        ({"utils__x": "from rlhub import config"}, "utils must not import config"),
        ({"models__x": "from ..engines import base"}, "models must not import engines"),
        ({"config__x": "if TYPE_CHECKING:\n    from rlhub.protocol import DataProto"}, "config must not import protocol"),
        ({"misc__x": ""}, "in no row"),
    ],
)
def test_layer_rule_finds(files: dict[str, str], sentence: str) -> None:
    assert any(sentence in text for text in layer_violations(parsed(**files)).values())


def test_layer_rule_lets_pass() -> None:
    assert not layer_violations(parsed(trainer__x="import rlhub.workers.actor\nfrom rlhub import errors\nfrom . import fit"))


@pytest.mark.parametrize(
    "files",
    [
        {"workers__x": "import ray"},
        {"single_controller__launch": "def f():\n    from ray.util import placement_group"},
        {"algorithms__x": "import torch.distributed as dist"},
        {"algorithms__x": "from torch import distributed"},
        {"trainer__ppo__x": "from transformers import AutoTokenizer"},
        {"config__x": "import torch"},
    ],
)
def test_import_rule_finds(files: dict[str, str]) -> None:
    assert forbidden_imports(parsed(**files))


def test_import_rule_lets_pass() -> None:
    assert not forbidden_imports(parsed(single_controller__ray__cluster="import ray", trainer__x="import torch\nimport rayon"))


def test_size_rule_finds() -> None:
    text = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES + "y = 1\n" * MAX_FILE_LINES
    assert set(oversized(parsed(a__b=text), {"a/b.py": text})) == {"a/b.py", "a/b.py::f"}


@pytest.mark.parametrize("text", ["print(1)", "hasattr(1, 'x')", "try:\n    f()\nexcept:\n    pass", "x = 1  # TO" + "DO later"])
def test_tidiness_rule_finds(text: str) -> None:
    assert len(untidy(parsed(a__b=text), {"a/b.py": text})) == 1


def test_tidiness_rule_reads_code_not_text() -> None:
    text = '"""print(1)"""\nlog.print(1)'
    assert not untidy(parsed(a__b=text), {"a/b.py": text})


@pytest.mark.parametrize("text", ["def f(x) -> int: ...", "def f(x: int): ...", "def f(*rest) -> None: ..."])
def test_annotation_rule_finds(text: str) -> None:
    assert unannotated(parsed(a__b=text))


def test_cycle_rule_finds() -> None:
    files = parsed(models__x="import rlhub.engines.a", engines__x="import rlhub.data.a", data__x="import rlhub.models.a")
    assert import_cycles(files) == ["data <-> engines", "data <-> models", "engines <-> models"]
    assert not import_cycles(parsed(models__x="import rlhub.data.a", engines__x="import rlhub.data.a"))


CYCLE = {
    "models__x": "from rlhub.models.y import Y",
    "models__y": "def f():\n    import rlhub.models.z",
    "models__z": "if TYPE_CHECKING:\n    from .x import X",
    "models__w": "from rlhub.models import x",
}


def test_file_cycle_rule_finds() -> None:
    assert file_cycles(parsed(**CYCLE)) == ["models/x.py <-> models/y.py <-> models/z.py"]
    package, module = "from rlhub.models.x import X", "from rlhub.models import Y"
    through_the_package = {"models/__init__.py": ast.parse(package), "models/x.py": ast.parse(module)}
    assert file_cycles(through_the_package) == ["models/__init__.py <-> models/x.py"]


@pytest.mark.parametrize("gone", ["models__x", "models__y", "models__z"])
def test_file_cycle_rule_lets_pass(gone: str) -> None:
    assert file_cycles(parsed(**CYCLE | {gone: ""})) == []


def test_signature_rule_finds() -> None:
    names = ", ".join(f"a{number}: int" for number in range(MAX_PARAMETERS - 1))
    text = f"class C:\n    def f(self, {names}, *b: int, c: int) -> None: ...\n    def g(self, {names}, *b: int) -> None: ..."
    assert set(overlong_signatures(parsed(a__b=text))) == {"a/b.py::f"}


def test_light_process_rule_finds() -> None:
    """And blames nobody else: what one has loaded the next one has not."""
    assert loaded_by("import json", "import pyarrow", "import rlhub") == {"import pyarrow": {"pyarrow"}}


def test_light_process_rule_passes_an_error_on() -> None:
    with pytest.raises(AssertionError, match="no_such_module"):
        loaded_by("import json", "import no_such_module")
