"""What can be found wrong with generation before any process starts: workflows and their settings, servers of other jobs."""

from __future__ import annotations

from pathlib import Path

from rlhub.config import asynchronous
from rlhub.config.ppo import PPOConfig
from rlhub.data import AGENT_NAME, has_column
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, resolve_engine_name
from rlhub.errors import ConfigError, RegistryError
from rlhub.workflows.registry import WORKFLOWS
from rlhub.workflows.settings import default_workflow, fill_knobs, workflow_kwargs

_ROLLOUT = "actor_rollout_ref.rollout"


def check_episodes(config: PPOConfig) -> list[str]:
    """The workflow exists and its settings fit, and groups can be filtered as they finish."""
    if not asynchronous.is_async(config):
        return []
    scoring = config.reward_model
    problems = [*_check_workflow(config), *_check_tools(config)]
    if config.algorithm.filter_groups.enable and (scoring.function_weight == 0 or scoring.enable or scoring.judge.model.path):
        problems.append(
            f"algorithm.filter_groups.enable=true with {_ROLLOUT}.mode=async compares the samples of a prompt once they are "
            "finished, which takes a reward function alone: switch reward_model.enable and the judge off (and function_weight "
            f"on), or set {_ROLLOUT}.mode=sync"
        )
    return problems


def check_rollout_engine(config: PPOConfig) -> list[str]:
    """What the engine's own part of the configuration lacks."""
    return _engine_problems(config, trains=False)


def check_weights_reach(config: PPOConfig) -> list[str]:
    """What keeps the engine from getting the weights that are trained, beyond `check_rollout_engine`."""
    known = set(check_rollout_engine(config))
    return [problem for problem in _engine_problems(config, trains=True) if problem not in known]


def _engine_problems(config: PPOConfig, *, trains: bool) -> list[str]:
    rollout, name = config.actor_rollout_ref.rollout, resolve_engine_name(config.actor_rollout_ref.rollout.name)
    if config.trainer.replay_from or asynchronous.is_collected(config) or name not in ROLLOUT_ENGINES:
        return []  # nothing generates here, or the name is a problem of its own
    judge = ROLLOUT_ENGINES.companion(name, "problems")
    found: list[str] = judge(rollout, trains=trains) if judge is not None else []
    return found


def _check_workflow(config: PPOConfig) -> list[str]:
    """Of rows that name none.  A class of the user's own says what it needs when it is built."""
    rollout = config.actor_rollout_ref.rollout
    name, key = default_workflow(rollout), f"{_ROLLOUT}.agent.default_agent_loop"
    path, _, attribute = name.rpartition(":")
    if attribute and path:
        missing = path.endswith(".py") and not Path(path).expanduser().is_file()
        return [f"{key}={name}: no such file ({Path(path).expanduser().resolve()})"] if missing else []
    try:
        WORKFLOWS.row(name)
    except RegistryError as error:
        return [f"{key}: {error}"]
    return [] if _rows_choose(config) else _check_knobs(config, name)


def _rows_choose(config: PPOConfig) -> bool:
    """Whether the settings may be those of workflows that the data names."""
    return any(has_column(files, AGENT_NAME) for files in (config.data.train_files, config.data.val_files))


def _check_knobs(config: PPOConfig, name: str) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.agent.kwargs and not rollout.multi_turn.enable:
        return []
    knobs = WORKFLOWS.knobs_class(name)
    if knobs is None:  # it may read its settings in a way of its own
        return []
    try:
        fill_knobs(knobs, workflow_kwargs(rollout))
    except ConfigError as error:
        return [f"{problem} (workflow {name})" for problem in error.problems]
    return []


def _check_tools(config: PPOConfig) -> list[str]:
    path = workflow_kwargs(config.actor_rollout_ref.rollout).get("tool_config_path")
    if path is None or Path(str(path)).expanduser().is_file():
        return []
    return [
        f"{_ROLLOUT}.multi_turn.tool_config_path={path}: no such file (looked for {Path(str(path)).expanduser().resolve()}); "
        "name the YAML file that lists the tools"
    ]
