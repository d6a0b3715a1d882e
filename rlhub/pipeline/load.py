"""Finds the pipeline that a setting names: a built-in one, or a function of the user's own.

Such a function is called with the configuration and the needs of the chosen algorithm and returns a Pipeline; it may start from a
built-in one and insert, replace and remove nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhub.config.names import target_problems, unknown
from rlhub.errors import ConfigError, RlhubError
from rlhub.pipeline.graph import Pipeline, TaskGraph
from rlhub.registry import Registry
from rlhub.utils.user_code import load_target

PipelineFunction = Callable[[Any, Any], Pipeline]
"""(configuration, needs) -> Pipeline"""
PIPELINES: Registry[PipelineFunction] = Registry("pipeline")
PIPELINES.add_lazy("ppo", "rlhub.pipeline.builtin:ppo")
PIPELINES.add_lazy("dapo", "rlhub.pipeline.builtin:dapo")
PIPELINES.add_lazy("sft", "rlhub.pipeline.builtin:sft")
PIPELINES.add_lazy("dpo", "rlhub.pipeline.builtin:dpo")
SETTING = "trainer.pipeline"


def load_pipeline(target: str) -> PipelineFunction:
    """Returns the function of a pipeline: a registered name, "module:function" or "path/to/file.py:function".

    Raises ConfigError for a name that there is not, and LoadError where the user's file cannot be run.
    """
    problems = target_problems(SETTING, target) if ":" in target else unknown(SETTING, PIPELINES, target)
    if problems:
        raise ConfigError(problems)
    function: PipelineFunction = load_target(target) if ":" in target else PIPELINES.get(target)
    return function


def build_pipeline(target: str, config: Any, needs: Any) -> TaskGraph:
    """Returns the checked graph of a configuration's pipeline.

    The user's function is run; nothing that nodes name is imported.  Raises ConfigError with all that is wrong.
    """
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
    problems = pipeline.problems(config)
    if problems:
        raise ConfigError([f"{SETTING}={target}: {problem}" for problem in problems])
    return pipeline.build(config)


def pipeline_problems(target: str, config: Any, needs: Any) -> list[str]:
    """Returns all that is wrong with a configuration's pipeline, for the checks before the start."""
    try:
        build_pipeline(target, config, needs)
    except ConfigError as error:
        return list(error.problems)
    return []
