"""Checks of generation: the workflow of episodes and its settings, tools and environments, and the rollout engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhub.agents.workflows.knobs import AgentKnobs, EndpointKnobs, EnvironmentKnobs, OnlineKnobs, ToolKnobs
from rlhub.agents.workflows.registry import WHERE, WORKFLOWS, default_workflow, fill_knobs, split_name, workflow_kwargs
from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.config.names import read_source, settings_problems, target_problems, unknown
from rlhub.config.rules import asynchronous, checks
from rlhub.config.rules.derive import resolve_device
from rlhub.config.rules.sources import sources_of
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import MultiTurnConfig, RolloutConfig
from rlhub.data import AGENT_NAME, has_column, texts_of
from rlhub.engines.rollout.registry import (
    RECORDING_PROBLEMS,
    ROLLOUT_ENGINES,
    model_problems,
    most_replicas,
    quantization_problems,
    resolve_engine_name,
)
from rlhub.envs.registry import ENVIRONMENTS
from rlhub.errors import ConfigError
from rlhub.models.shape import local_shape, read_model_values, routing_problems
from rlhub.registry import suggest
from rlhub.tools.registry import TOOLS, reply_problems
from rlhub.tools.toolbox import read_tool_file
from rlhub.trainer.ppo.requirements import requirements

_ROLLOUT = "actor_rollout_ref.rollout"


def check_episodes(config: PPOConfig) -> list[str]:
    """Returns the problems of episodes: an unknown workflow, settings that do not fit it, and filters that no group can pass."""
    if not asynchronous.is_async(config):
        return []
    scoring = config.reward_model
    problems = [*_check_workflow(config), *_check_source_workflows(config), *_check_tools(config)]
    if config.algorithm.filtering and (scoring.function_weight == 0 or scoring.enable or scoring.judge.model.path):
        problems.append(
            f"{config.algorithm.filtering} with {_ROLLOUT}.mode=async compares the samples of a prompt once they are "
            "finished, which takes a reward function alone: switch reward_model.enable and the judge off (and function_weight "
            f"on), or set {_ROLLOUT}.mode=sync"
        )
    return problems


def check_rollout_engine(config: PPOConfig) -> list[str]:
    """Returns the problems of the engine's own settings, and the reasons why it cannot run the model."""
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.controller == "multi" and most_replicas(rollout) is not None:
        return [
            f"trainer.controller=multi with {_ROLLOUT}.name={rollout.name}, whose servers one driver calls; set "
            f"{_ROLLOUT}.name=vllm or hf, or trainer.controller=single"
        ]
    return _engine_problems(config, trains=False)


def check_weights_read(config: PPOConfig) -> list[str]:
    """Returns the reasons why the engine cannot generate from the model's files, without those that `check_rollout_engine`
    returns."""
    known, section = set(check_rollout_engine(config)), config.actor_rollout_ref
    device = resolve_device(config.trainer.device)
    found = quantization_problems(section.rollout, section.model, device=device, reads_files=True)
    return [problem for problem in found if problem not in known]


def check_weights_reach(config: PPOConfig) -> list[str]:
    """Returns the reasons why trained weights cannot reach the engine, or its samples cannot train them, without those that
    `check_rollout_engine` returns."""
    known, loss = set(check_rollout_engine(config)), config.actor_rollout_ref.actor.policy_loss.loss_mode
    requires = POLICY_LOSSES.row(loss).requires if loss in POLICY_LOSSES else frozenset()
    found = [*_engine_problems(config, trains=True), *checks.check_quantization(config, requires)]
    return [problem for problem in found if problem not in known]


def _engine_problems(config: PPOConfig, *, trains: bool) -> list[str]:
    rollout, name = config.actor_rollout_ref.rollout, resolve_engine_name(config.actor_rollout_ref.rollout.name)
    if config.trainer.replay_from or asynchronous.is_collected(config) or name not in ROLLOUT_ENGINES:
        return []  # nothing generates here, or the name is a problem of its own
    judge = ROLLOUT_ENGINES.companion(name, "problems")
    found: list[str] = judge(rollout, trains=trains) if judge is not None else []
    model = config.actor_rollout_ref.model
    found += quantization_problems(rollout, model, device=resolve_device(config.trainer.device))
    found += _check_recording(config, name)
    return [*found, *_check_replicas(rollout), *model_problems(name, model, where=f"{_ROLLOUT}.name")]


def _check_recording(config: PPOConfig, name: str) -> list[str]:
    """Returns the reasons why the experts of tokens cannot be recorded, or replayed, where they are to be."""
    replay = config.actor_rollout_ref.actor.router_replay
    if replay == "disabled":
        return []
    judge = ROLLOUT_ENGINES.companion(name, RECORDING_PROBLEMS)
    if judge is None:
        reasons = [f"{_ROLLOUT}.name={name} does not tell the experts of its tokens; set it to hf, or on GPUs vllm"]
    else:
        reasons = judge(config.actor_rollout_ref.rollout, resolve_device(config.trainer.device))
    model = config.actor_rollout_ref.model
    if local_shape(model.path, model.override_config) is not None:
        values = read_model_values(Path(str(model.path)).expanduser(), model.override_config)
        reasons = [*reasons, *(f"{reason}; set it to disabled" for reason in routing_problems(values))]
    return [f"actor_rollout_ref.actor.router_replay={replay}: {reason}" for reason in reasons]


def _check_replicas(rollout: RolloutConfig) -> list[str]:
    """Returns the problems of bounds on the number of replicas that an engine with servers of its own cannot reach."""
    most, given = most_replicas(rollout), {"min_replicas": rollout.min_replicas, "max_replicas": rollout.max_replicas}
    return [
        f"{_ROLLOUT}.{key}={number} with {_ROLLOUT}.name={rollout.name}: its configuration has servers for {most} replicas; "
        "lower it, or add a server (remote.urls)"
        for key, number in given.items()
        if most is not None and number is not None and number > most
    ]


def _check_workflow(config: PPOConfig) -> list[str]:
    """Returns the problems of the default workflow, which runs the rows that name none, and of those that have targets."""
    name = default_workflow(config.actor_rollout_ref.rollout)
    targets = _named_targets(config, name)
    problems = [] if name in targets else _check_default(config, name)
    return problems + [problem for each in sorted(targets) for problem in _check_target(config, each)]


def _check_default(config: PPOConfig, name: str) -> list[str]:
    key = f"{_ROLLOUT}.agent.default_agent_loop"
    if ":" in name:
        return target_problems(key, name) or _check_own_workflow(config, key, name)
    if problems := unknown(key, WORKFLOWS, name):
        return problems
    knobs = WORKFLOWS.knobs_class(name)
    if knobs is None or _rows_choose(config):
        return _check_settings_read(config, WORKFLOWS.get, name)
    return _check_knobs(config, knobs, name)


def _named_targets(config: PPOConfig, default: str) -> set[str]:
    """Returns the names, of the default, of rows and of sources, that give a registered workflow its target."""
    names = {default} | texts_of(config.data.train_files, AGENT_NAME) | texts_of(config.data.val_files, AGENT_NAME)
    names |= {source.agent_name for source in sources_of(config.data).values() if source.agent_name}
    return {name for name in names if split_name(name)[0] != name}


def _check_target(config: PPOConfig, name: str) -> list[str]:
    registered, target = split_name(name)
    knobs: Any = WORKFLOWS.knobs_class(registered)
    problems = [] if _rows_choose(config) else _check_knobs(config, knobs, name)
    if problems:
        return problems
    known = {field.name for field in dataclasses.fields(knobs)}
    own = {key: value for key, value in workflow_kwargs(config.actor_rollout_ref.rollout).items() if key in known}
    judge = WORKFLOWS.companion(registered, "problems")
    return list(judge(knobs(**own), target)) if judge is not None else []


def _check_source_workflows(config: PPOConfig) -> list[str]:
    """Returns the problems of the workflows of data sources that have their own."""
    named = {f"data.sources.{name}.agent_name": source.agent_name for name, source in sources_of(config.data).items()}
    return [
        problem
        for key, name in named.items()
        if name and not split_name(name)[1]
        for problem in (target_problems(key, name) if ":" in name else unknown(key, WORKFLOWS, name))
    ]


def _rows_choose(config: PPOConfig) -> bool:
    """Returns True where rows of the data, or their sources, name their workflows, whose settings may be the ones given."""
    if any(source.agent_name for source in sources_of(config.data).values()):
        return True
    return any(has_column(files, AGENT_NAME) for files in (config.data.train_files, config.data.val_files))


def _check_own_workflow(config: PPOConfig, key: str, name: str) -> list[str]:
    """Returns the problems of the user's own workflow.  It imports the class, and torch with it, as the run does."""
    from rlhub.agents.workflows.base import class_problems, knobs_of
    from rlhub.agents.workflows.registry import workflow_class

    try:
        found = workflow_class(name)
    except ConfigError as error:
        return [f"{key}: {problem}" for problem in error.problems]
    if problems := class_problems(found):
        return [f"{key}={name}: {problem}" for problem in problems]
    knobs = knobs_of(found)
    if knobs is None or _rows_choose(config):
        return _check_settings_read(config, workflow_class, name)
    return _check_knobs(config, knobs, name)


def _check_settings_read(config: PPOConfig, load: Callable[[str], Any], name: str) -> list[str]:
    """Returns the settings that a workflow without knobs does not read.  It imports the workflow only where some are given."""
    given = [key for key in config.actor_rollout_ref.rollout.agent.kwargs if key not in MultiTurnConfig.__dataclass_fields__]
    if not given or _rows_choose(config):
        return []
    from rlhub.agents.workflows.base import settings_read

    read = settings_read(load(name))
    if read is None:
        return []
    known = f"it reads: {', '.join(sorted(read))}" if read else "it takes none"
    return [f"{WHERE}.{key}: no such setting of workflow {name}{suggest(key, read)}; {known}" for key in given if key not in read]


def _check_knobs(config: PPOConfig, cls: type, name: str) -> list[str]:
    """Returns the problems of the workflow's settings as its knobs' class reads them."""
    try:
        knobs: Any = fill_knobs(cls, workflow_kwargs(config.actor_rollout_ref.rollout))
    except ConfigError as error:
        return [f"{problem} (workflow {name})" for problem in error.problems]
    except TypeError as error:  # raised by the user's own class
        return [f"{WHERE}: {cls.__name__} of workflow {name} must have a default for every setting: {error}"]
    problems = _check_named(knobs, name)
    return [*problems, *_check_online(config, knobs)] if isinstance(knobs, OnlineKnobs) else problems


def _check_online(config: PPOConfig, knobs: OnlineKnobs) -> list[str]:
    """Returns the problems of sessions that applications open: these know one address, at which only training's episodes are."""
    problems, agent = [], config.actor_rollout_ref.rollout.agent
    try:
        knobs.read_key()
    except ConfigError as error:
        problems += [f"{WHERE}.{problem}" for problem in error.problems]
    if (agent.num_workers or 0) > 1:
        problems.append(
            f"{_ROLLOUT}.agent.num_workers={agent.num_workers} with workflow {agent.default_agent_loop}: applications open "
            "their sessions at one address; set it to 1, or to 0"
        )
    if config.trainer.test_freq > 0:
        problems.append(
            f"trainer.test_freq={config.trainer.test_freq} with workflow {agent.default_agent_loop}: no application takes "
            "validation's episodes; set trainer.test_freq=-1, or give all rows an agent_name, those of data.val_files single_turn"
        )
    if requirements(config).baseline_rewards:
        problems.append(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} with workflow {agent.default_agent_loop}: no application "
            "takes the greedy episode of each prompt; choose another estimator, such as grpo"
        )
    return problems


def _check_named(knobs: Any, workflow: str) -> list[str]:
    """Returns the problems of the tools, environments and agents that a workflow's settings name."""
    problems: list[str] = []
    if isinstance(knobs, ToolKnobs):
        problems += reply_problems(f"{_ROLLOUT}.multi_turn.format", knobs.format, knobs.reasoning_parser)
        problems += _check_entries(knobs.tools, f"{WHERE}.tools")
    if isinstance(knobs, EnvironmentKnobs):
        problems += _check_environment(knobs, workflow)
    if isinstance(knobs, EndpointKnobs):
        problems += reply_problems(f"{WHERE}.format", knobs.format, knobs.reasoning_parser)
    if isinstance(knobs, AgentKnobs):
        problems += _check_agent(knobs.agent, workflow)
    return problems


def _check_environment(knobs: EnvironmentKnobs, workflow: str) -> list[str]:
    key, name = f"{WHERE}.environment", knobs.environment
    if not name:
        there = ", ".join(ENVIRONMENTS.names())
        return [f"{key} is not set, and workflow {workflow} plays one: path/to/file.py:ClassName, or of {there}"]
    if ":" not in name:
        return unknown(key, ENVIRONMENTS, name)
    return target_problems(key, name) or settings_problems(f"{WHERE}.environment_kwargs", name, knobs.environment_kwargs)


def _check_agent(agent: str, workflow: str) -> list[str]:
    key = f"{WHERE}.agent"
    if not agent:
        return [f"{key} is not set, and workflow {workflow} runs one: path/to/agent.py:run or path/to/script.py"]
    if agent.endswith(".py"):
        problem = read_source(agent).problem
        return [f"{key}={agent}: {problem}"] if problem else []
    given = dict.fromkeys(("base_url", "api_key", "row"))
    return target_problems(key, agent) or [
        f"{key}={agent}: must take base_url, api_key and row by these names ({problem.partition(': ')[2]})"
        for problem in settings_problems(key, agent, given)
    ]


def _check_tools(config: PPOConfig) -> list[str]:
    """Returns the problems of the file that lists the tools, and of its entries."""
    path = workflow_kwargs(config.actor_rollout_ref.rollout).get("tool_config_path")
    if path is None:
        return []
    key = f"{_ROLLOUT}.multi_turn.tool_config_path={path}"
    if not Path(str(path)).expanduser().is_file():
        return [
            f"{key}: no such file (looked for {Path(str(path)).expanduser().resolve()}); name the YAML file that lists the tools"
        ]
    try:
        return _check_entries(read_tool_file(str(path)), key)
    except ConfigError as error:
        return [f"{_ROLLOUT}.multi_turn.{problem}" for problem in error.problems]


def _check_entries(entries: Sequence[Any], key: str) -> list[str]:
    """Returns the problems of a list of tools that are found without loading them."""
    return [problem for number, entry in enumerate(entries) for problem in _check_entry(entry, f"{key}, entry {number}")]


def _check_entry(entry: Any, where: str) -> list[str]:
    given = entry if isinstance(entry, Mapping) else {"name": entry}
    name, settings = given.get("name"), given.get("settings") or {}
    if not isinstance(name, str) or not isinstance(settings, Mapping) or given.keys() - {"name", "settings"}:
        return [f"{where} ({entry!r:.80}): expected a name, or a mapping with 'name' and 'settings'"]
    if ":" not in name:
        return unknown(where, TOOLS, name)
    return target_problems(where, name) or settings_problems(where, name, settings, complete=False)
