"""Finds the pipeline that a setting names: a built-in one, or a function of the user's own.

Such a function is called with the configuration and the needs of the chosen algorithm and returns a Pipeline; it may start from a
built-in one and insert, replace and remove nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhub.config.names import target_problems, unknown
from rlhub.config.rules.engines import ONLY_ROLE
from rlhub.config.rules.placement import unplaceable
from rlhub.errors import ConfigError, RlhubError
from rlhub.pipeline.checks import NONE_MISSING, ROLES
from rlhub.pipeline.graph import Pipeline, TaskGraph
from rlhub.pipeline.nodes import DRIVER
from rlhub.registry import Registry
from rlhub.utils.user_code import load_target

PipelineFunction = Callable[[Any, Any], Pipeline]
"""(configuration, needs) -> Pipeline"""
PIPELINES: Registry[PipelineFunction] = Registry("pipeline")
BUILT_IN: Mapping[str, tuple[str, ...]] = {"ppo": ("ppo", "dapo"), "sft": ("sft",), "dpo": ("dpo",), "rm": ("rm",)}
"""The pipelines of each command, main_ppo and so on; the first is its own."""
for _name in (name for names in BUILT_IN.values() for name in names):
    PIPELINES.add_lazy(_name, f"rlhub.pipeline.builtin:{_name}")
SETTING = "trainer.pipeline"
SUPERVISED_ROLES = {DRIVER: "rlhub.pipeline.builtin:DataDriver"}
"""The roles of main_sft, main_dpo and main_rm beside those of a pipeline itself."""


def command_of(config: Any) -> str:
    """Returns the name of the command whose configuration this is, for example sft, which is also that of its own pipeline."""
    return type(config).__name__.removesuffix("Config").lower()


def load_pipeline(target: str) -> PipelineFunction:
    """Returns the function of a pipeline: a registered name, "module:function" or "path/to/file.py:function".

    Raises ConfigError for a name that there is not, and LoadError where the user's file cannot be run.
    """
    problems = target_problems(SETTING, target) if ":" in target else unknown(SETTING, PIPELINES, target)
    if problems:
        raise ConfigError(problems)
    function: PipelineFunction = load_target(target) if ":" in target else PIPELINES.get(target)
    return function


def build_pipeline(
    target: str,
    config: Any,
    needs: Any,
    usual: Mapping[str, str] = ROLES,
    missing: Mapping[str, str] = NONE_MISSING,
    complete: Callable[[Pipeline], object] | None = None,
) -> TaskGraph:
    """Returns the checked graph of a configuration's pipeline.

    usual: the roles that there are beside the pipeline's own, with the class of each.  missing: those of them that this job does
    not have, with the remedy of each.  complete: adds the nodes that a command needs in every pipeline.  The user's function is
    run; nothing that nodes name is imported.  Raises ConfigError with all that is wrong.
    """
    pipeline = _declared(target, config, needs)
    if complete is not None:
        complete(pipeline)
    problems = pipeline.problems(config, usual, missing)
    if DRIVER in pipeline.roles:
        problems.append(f"the role {DRIVER!r} is this command's own: nodes call functions of yours by run='file.py:name'")
    problems = [f"{SETTING}={target}: {problem}" for problem in problems]
    if config is not None:
        problems += unplaceable(config.trainer, usual, pipeline.roles)
    if problems:
        raise ConfigError(problems)
    return pipeline.graph()


def _declared(target: str, config: Any, needs: Any) -> Pipeline:
    """Returns what the function of a pipeline returns.  Raises ConfigError where it fails, or is another command's."""
    own = BUILT_IN.get(command_of(config), ())
    if target not in own and any(target in names for names in BUILT_IN.values()):
        raise ConfigError(
            f"{SETTING}={target} is another command's; of this one: {', '.join(own)}, or your own as path.py:function"
        )
    try:
        pipeline: Any = load_pipeline(target)(config, needs)
    except ConfigError:
        raise
    except RlhubError as error:
        raise ConfigError(f"{SETTING}={target}: {error}") from error
    except Exception as error:  # boundary to the user's code
        raise ConfigError(f"{SETTING}={target}: it raised {type(error).__name__}: {error}") from error
    if not isinstance(pipeline, Pipeline):
        found = type(pipeline).__name__
        raise ConfigError(f"{SETTING}={target}: it returned {found}; expected a rlhub.pipeline.graph.Pipeline")
    return pipeline


def supervised_graph(config: Any) -> TaskGraph:
    """Returns the checked graph of main_sft, main_dpo or main_rm.  Raises ConfigError with all that is wrong."""
    target = config.trainer.pipeline or command_of(config)
    graph = build_pipeline(target, config, None, SUPERVISED_ROLES)
    if ONLY_ROLE not in graph.roles:
        raise ConfigError(f"{SETTING}={target}: it has no role {ONLY_ROLE!r}, which is the one that is validated")
    return graph


def problems_of(build: Callable[[], object]) -> list[str]:
    """Returns all that is wrong with a pipeline that `build` builds, for the checks before the start."""
    try:
        build()
    except ConfigError as error:
        return list(error.problems)
    return []
