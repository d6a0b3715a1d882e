"""A registered part is named in its own file, in the registry's table and in config defaults, and nowhere else in rlhub.

Read from the syntax trees: a string constant that equals a registered name makes some code know one part from another.
Docstrings are text for people and do not count.  A name that also means something else, where it does, is in MEANINGS.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from rlhub.agents.workflows.registry import WORKFLOWS
from rlhub.algorithms import registry as algorithms
from rlhub.data.samplers import SAMPLERS
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES
from rlhub.engines.training.registry import TRAIN_ENGINES
from rlhub.envs.registry import ENVIRONMENTS
from rlhub.pipeline.load import PIPELINES
from rlhub.registry import Registry
from rlhub.rewards.registry import REWARD_MANAGERS, SCORERS
from rlhub.sandboxes.registry import SANDBOXES
from rlhub.tools.registry import TOOL_FORMATS, TOOLS
from rlhub.tracking.recorder import TRACKERS
from tests.support.source_trees import nodes, trees

TABLES = frozenset(
    {
        "algorithms/registry.py",
        "engines/rollout/registry.py",
        "engines/training/registry.py",
        "envs/registry.py",
        "pipeline/load.py",
        "rewards/registry.py",
        "tools/registry.py",
        "tracking/recorder.py",
        "agents/workflows/registry.py",
        "data/samplers.py",
        "sandboxes/registry.py",
    }
)
"""The registries' own tables."""

ALGORITHMS: dict[str, Registry[Any]] = {name: value for name, value in vars(algorithms).items() if isinstance(value, Registry)}
OTHERS: dict[str, Registry[Any]] = {
    "ROLLOUT_ENGINES": ROLLOUT_ENGINES,
    "TRAIN_ENGINES": TRAIN_ENGINES,
    "ENVIRONMENTS": ENVIRONMENTS,
    "PIPELINES": PIPELINES,
    "REWARD_MANAGERS": REWARD_MANAGERS,
    "SCORERS": SCORERS,
    "SAMPLERS": SAMPLERS,
    "SANDBOXES": SANDBOXES,
    "TOOLS": TOOLS,
    "TOOL_FORMATS": TOOL_FORMATS,
    "TRACKERS": TRACKERS,
    "WORKFLOWS": WORKFLOWS,
}

MEANINGS: dict[tuple[str, str], str] = {
    ("config/rules/asynchronous.py", "environment"): "a setting of that workflow",
    ("config/rules/engines.py", "megatron"): "the section's name",
    ("sandboxes/workspace.py", "rm"): "a program",
    ("agents/verifiers/export.py", "verifiers:"): "the library's name in a message",
    ("agents/verifiers/process.py", "verifiers:"): "the library's name in a message",
    ("agents/verifiers/process.py", "environment"): "an argument of its child",
    **{
        ("config/rules/sources.py", name): "which samplers have shares of sources"
        for name in ("uniform", "curriculum", "mixture")
    },
    ("models/megatron/transformer_config.py", "uniform"): "a method of recomputation",
    ("tracking/swanlab.py", "online"): "a mode of that library",
    ("config/load.py", "megatron"): "the section's name",
    ("models/megatron/checks.py", "megatron"): "the section's name",
    **{("config/sections/training.py", name): "which section belongs to the engine" for name in ("fsdp", "fsdp2", "megatron")},
    **{(f"envs/vector/{name}.py", "exact"): "a kind of state" for name in ("base", "lockstep", "reach_color")},
    ("models/megatron/compat.py", "wandb"): "a Python package that megatron imports",
    ("single_controller/ray/cluster.py", "wandb"): "the folder that package writes to",
    ("tracking/metrics_log.py", "kl"): "a column's heading",
    **{("tracking/run_folder.py", name): "the folder that package writes to" for name in ("tensorboard", "wandb")},
    ("engines/rollout/remote/dialects.py", "vllm"): "a kind of server that another job runs",
    ("protocol/serialization.py", "json"): "a kind of column",
    ("trainer/preflight/checks.py", "dpo"): "the section's name",
    ("pipeline/show.py", "json"): "a way to show a pipeline",
    **{(f"trainer/main_{name}.py", name): "the job's configuration" for name in ("ppo", "sft", "dpo", "rm")},
}
"""(path, string) -> what else the string means there."""


def docstrings(tree: ast.Module) -> set[int]:
    """Identities of string expressions that stand alone: docstrings, and those below a field or a constant."""
    return {id(node.value) for node in nodes(tree, ast.Expr) if isinstance(node.value, ast.Constant)}


def defaults(tree: ast.Module) -> set[int]:
    """Identities of the constants in the default of a dataclass field, and in the Literal that lists its choices."""
    fields = [item for node in nodes(tree, ast.ClassDef) for item in node.body if isinstance(item, ast.AnnAssign)]
    return {id(part) for item in fields for part in ast.walk(item) if isinstance(part, ast.Constant)}


def strings(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string constant that is code."""
    ignored = docstrings(tree) | (defaults(tree) if path.startswith("config/") else set())
    for node in nodes(tree, ast.Constant):
        if isinstance(node.value, str) and id(node) not in ignored:
            yield node.lineno, node.value


def own_files(registry: Registry[Any], name: str) -> set[str]:
    """The module a lazy row points to, and what lies beside it in a package of its own."""
    target = registry.row(name).target
    module = target.partition(":")[0] if isinstance(target, str) else target.__module__
    path = module.removeprefix("rlhub.").replace(".", "/")
    return {f"{path}.py", f"{path}/__init__.py"}


def named(files: dict[str, ast.Module], registries: dict[str, Registry[Any]]) -> dict[tuple[str, str], str]:
    """(path, name) -> sentence, for each registered name in a file that should not know it."""
    found = {}
    names = {name for registry in registries.values() for name in registry.names()}
    for path, tree in files.items():
        if path in TABLES:
            continue
        for line, text in strings(path, tree):
            if text not in names:
                continue
            kinds = [registry for registry in registries.values() if text in registry]
            strange = [registry for registry in kinds if not belongs(path, registry, text)]
            if strange and len(strange) == len(kinds):
                found[path, text] = f"rlhub/{path}:{line}: names the {strange[0].kind} {text!r}"
    return found


def belongs(path: str, registry: Registry[Any], name: str) -> bool:
    own = own_files(registry, name)
    folders = {file.rpartition("/")[0] for file in own if file.endswith("/engine.py")}
    return path in own or any(path.startswith(f"{folder}/") for folder in folders)


def test_algorithms_are_named_nowhere_else() -> None:
    found = named(trees(), ALGORITHMS)
    assert [text for key, text in found.items() if key not in MEANINGS] == []


def test_other_parts_are_named_nowhere_else() -> None:
    found = named(trees(), OTHERS)
    assert [text for key, text in found.items() if key not in MEANINGS] == []


def test_every_meaning_is_used() -> None:
    assert MEANINGS.keys() <= named(trees(), ALGORITHMS | OTHERS).keys()


def test_every_registry_is_looked_at() -> None:
    """A table of a new registry must be added here."""
    tables = {path for path, tree in trees().items() if any("Registry(" in ast.unparse(node) for node in constructed(tree))}
    assert tables == TABLES
    assert len(ALGORITHMS) >= 3


def constructed(tree: ast.Module) -> Iterator[ast.stmt]:
    return (node for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call))


@pytest.mark.parametrize(
    ("path", "source", "seen"),
    [
        ("trainer/ppo/step.py", "if estimator == 'grpo': pass", True),
        ("trainer/ppo/step.py", "needs = {'gae': 1}", True),
        ("workers/roles.py", "def f(mode: str = 'vanilla'): ...", True),
        ("engines/training/updates.py", "loss = losses['low_var_kl']", True),
        ("algorithms/advantages/rloo.py", "f('grpo')", True),
        ("algorithms/advantages/grpo.py", "f('grpo')", False),
        ("algorithms/registry.py", "f('grpo')", False),
        ("trainer/ppo/step.py", "'''grpo'''", False),
        ("trainer/ppo/step.py", "x = 'critic/grpo'", False),
        ("config/sections/algorithm.py", "class A:\n    adv_estimator: str = 'grpo'\n    'gae'", False),
        ("config/rules/checks.py", "if config.adv_estimator == 'gae': pass", True),
        ("trainer/ppo/step.py", "class A:\n    adv_estimator: str = 'grpo'", True),
    ],
)
def test_a_planted_name_is_found_and_only_where_it_should_not_be(path: str, source: str, seen: bool) -> None:
    assert bool(named({path: ast.parse(source)}, ALGORITHMS)) is seen


def test_a_planted_engine_is_found() -> None:
    assert named({"trainer/ppo/trainer.py": ast.parse("x == 'vllm'")}, OTHERS)
    assert not named({"engines/rollout/vllm/memory.py": ast.parse("x == 'vllm'")}, OTHERS)
