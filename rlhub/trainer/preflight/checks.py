"""The checks of a job before any process starts, beyond the configuration's own rules: names, files, models and machine.

They load no torch, unless the user set an algorithm's own knobs, which only its module can check.  So a wrong path costs half a
second and not the start of a cluster.  All problems are returned, to be shown with those of the configuration.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES
from rlhub.checkpoint.store import CheckpointStore
from rlhub.config.devices import count_gpus, driver_problem, gpu_memory_gb, torch_has_cuda
from rlhub.config.names import read_source, target_problems, unknown
from rlhub.config.rules import checks, effects, embodied, placement
from rlhub.config.rules.engines import Engine, engines, role_ranks
from rlhub.config.rules.parallel import check_section
from rlhub.config.rules.sources import estimators_of
from rlhub.config.sections import rollout_correction
from rlhub.config.sections.ppo import DataConfig, PPOConfig
from rlhub.config.sections.preference import DPOConfig, PreferenceDataConfig, RMConfig
from rlhub.config.sections.reward import CustomRewardConfig, ScoringModelConfig
from rlhub.config.sections.sft import SFTConfig, SFTDataConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.data import check_columns, check_episode_folders, check_files
from rlhub.data.samplers import sampler_problems
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, model_problems, resolve_engine_name
from rlhub.engines.training.registry import TRAIN_ENGINES
from rlhub.errors import ConfigError
from rlhub.models.shape import (
    LANGUAGE_MODEL,
    prefix_problems,
    read_labels,
    read_model_shape,
    read_model_values,
    reward_problem,
)
from rlhub.pipeline.load import problems_of, supervised_graph
from rlhub.registry import Registry, knobs_for
from rlhub.rewards.judge_prompt import read_pattern, read_prompt
from rlhub.rewards.registry import REWARD_MANAGERS
from rlhub.tracking.recorder import TRACKERS, login_problems, package_problems
from rlhub.tracking.run_folder import RunFolder
from rlhub.trainer.ppo.plan import step_graph
from rlhub.trainer.ppo.requirements import check_estimators, check_group_metric, estimators_known, required
from rlhub.trainer.preflight.memory import check_memory, choose_recompute, estimate_memory, warn_of_memory
from rlhub.trainer.preflight.model_folders import HUB_NAME, check_length, read_shape
from rlhub.trainer.preflight.rollout import check_episodes, check_rollout_engine, check_weights_reach

logger = logging.getLogger(__name__)

CONVERSATION_COLUMN = "messages"  # as rlhub.data.supervised reads it, which loads torch
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_SHARED_KNOBS = {
    "algorithm": ("gamma", "lam", "norm_adv_by_std_in_grpo"),
    _ACTOR: ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    "dpo": ("beta", "label_smoothing"),
}
"""Settings, by section, that only some estimators or losses have as a knob of the same name."""


@functools.singledispatch
def check(config: Any, set_keys: AbstractSet[str] = frozenset()) -> list[str]:
    """Returns the problems of a derived configuration; [] if the job can start.  set_keys: the keys that the user set, for
    warnings about those without effect."""
    raise TypeError(f"no preflight for {type(config).__name__}")


@check.register
def _(config: PPOConfig, set_keys: AbstractSet[str] = frozenset()) -> list[str]:
    problems = [
        *import_plugins(config.trainer.plugins),
        *check_names(config),
        *check_data(config.data),
        *check_custom_reward(config.custom_reward_function),
        *check_group_metric(config),
        *check_models(config),
        *check_engines(config),
        *check_scoring_models(config),
        *check_machine(config.trainer),
        *(placement.cpus_on_machine(config.trainer, os.cpu_count() or 1) if _starts_cluster_here(config.trainer) else ()),
        *check_folders(config.trainer),
        *check_replay(config.trainer),
        *check_episodes(config),
        *check_rollout_engine(config),
    ]
    if estimators_known(config):
        problems += check_estimators(config)
        if config.actor_rollout_ref.actor.policy_loss.loss_mode in POLICY_LOSSES:
            problems += problems_of(lambda: step_graph(config))
    for warning in [] if problems else [*warnings(config, set_keys), *checks.notes(config), *surprises(config)]:
        logger.warning(warning)
    return problems


def check_training(config: PPOConfig, set_keys: AbstractSet[str] = frozenset()) -> list[str]:
    """Checks as `check` does, for a job that trains and does not only evaluate."""
    problems = [*check(config, set_keys), *check_weights_reach(config)]
    for key, own in estimators_of(config).items() if estimators_known(config) else ():
        requires = ADVANTAGE_ESTIMATORS.row(own.adv_estimator).requires
        found = embodied.requirement_problems(config, requires, f"{key}.adv_estimator={own.adv_estimator}")
        problems += [problem for problem in found if problem not in problems]
    return problems or _memory_problems(config)


@check.register
def _(config: SFTConfig, set_keys: AbstractSet[str] = frozenset()) -> list[str]:
    data = config.data
    if config.model.vla:
        found = [*check_episode_folders(data.train_files, "train"), *check_episode_folders(data.val_files, "val")]
        return _check_supervised(config, found)
    return _check_supervised(config, check_demonstrations(data))


@check.register
def _(config: DPOConfig, set_keys: AbstractSet[str] = frozenset()) -> list[str]:
    problems = _check_supervised(config, check_pairs(config.data))
    loss, mentioned = config.dpo.loss_type, [name for name in _SHARED_KNOBS["dpo"] if f"dpo.{name}" in set_keys]
    problems += unknown("dpo.loss_type", PREFERENCE_LOSSES, loss)
    problems += _check_knobs("dpo", PREFERENCE_LOSSES, loss, config.dpo, config.dpo.kwargs, always=bool(mentioned))
    if mentioned and not problems:
        unread = tuple(f"dpo.{name}" for name in mentioned if name not in _knob_names(PREFERENCE_LOSSES, loss))
        for warning in effects.without_effect(config, set_keys, [(True, unread, f"dpo.loss_type={loss} does not read it")]):
            logger.warning(warning)
    return problems


@check.register
def _(config: RMConfig, set_keys: AbstractSet[str] = frozenset()) -> list[str]:
    return _check_supervised(config, check_pairs(config.data, config.margin_key))


def _check_supervised(config: SFTConfig | DPOConfig | RMConfig, data_problems: list[str]) -> list[str]:
    """Returns `data_problems` and those that all supervised jobs can have."""
    problems = [*import_plugins(config.trainer.plugins), *check_trackers(config.trainer.logger), *data_problems]
    problems += [*check_machine(config.trainer), *check_folders(config.trainer), *check_engines(config)]
    problems += problems_of(lambda: supervised_graph(config))
    shape = read_shape(config.model, "model", problems)
    if shape is not None:
        problems += check_length(shape, config.data.max_length, f"data.max_length={config.data.max_length}", "model")
    return problems or _memory_problems(config)


def warnings(config: PPOConfig, set_keys: AbstractSet[str]) -> list[str]:
    """Returns warnings about settings of the user's that the chosen algorithm does not read.

    config: a configuration without problems.
    """
    requires, used = required(config), [own.adv_estimator for own in estimators_of(config).values()]
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    loss = f"{_ACTOR}.policy_loss.loss_mode={config.actor_rollout_ref.actor.policy_loss.loss_mode}"
    rules: list[effects.Dead] = [
        ("values" not in requires, ("critic.", "trainer.critic_warmup"), f"{estimator} has no critic"),
        _no_reference(config, requires),
        _twice_weighted(config, loss),
        *(_components_only(config, estimator, requires) if len(used) == 1 else ()),
    ]
    for section, registry, names, chosen in (
        ("algorithm", ADVANTAGE_ESTIMATORS, used, estimator),
        (_ACTOR, POLICY_LOSSES, [config.actor_rollout_ref.actor.policy_loss.loss_mode], loss),
    ):
        mentioned = [knob for knob in _SHARED_KNOBS[section] if f"{section}.{knob}" in set_keys]
        if mentioned:
            known = frozenset().union(*(_knob_names(registry, name) for name in names))
            unread = tuple(f"{section}.{knob}" for knob in mentioned if knob not in known)
            rules.append((True, unread, f"{chosen} does not read it"))
    return effects.without_effect(config, set_keys, rules)


def _no_reference(config: PPOConfig, requires: AbstractSet[str]) -> effects.Dead:
    """Returns the settings of the reference where nothing reads its log-probs."""
    why = f"there is no reference without {placement.READERS}"
    return not placement.reads_reference(config, requires), ("actor_rollout_ref.ref.",), why


def _components_only(config: PPOConfig, estimator: str, requires: AbstractSet[str]) -> list[effects.Dead]:
    """Returns the settings of the tokens' rewards, which an estimator that compares the scorer's own numbers, or log-probs, does
    not read."""
    read = "the reward function's own numbers" if "reward_components" in requires else "log-probs"
    holds, why = "components_only" in requires, f"{estimator} reads {read} alone"
    kl = ("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.")
    return [
        (
            holds and config.algorithm.use_kl_in_reward,
            kl,
            f"{why}; {_ACTOR}.use_kl_loss=true has a KL",
        ),
        (holds, ("algorithm.whiten_rewards",), why),
    ]


def _twice_weighted(config: PPOConfig, loss: str) -> effects.Dead:
    """Returns the settings of importance weights, which have no effect where the loss's own ratio is pi / mu already."""
    requires = POLICY_LOSSES.row(config.actor_rollout_ref.actor.policy_loss.loss_mode).requires
    keys = ("rollout_is", "rollout_is_threshold")
    return (
        config.algorithm.rollout_correction.bypass_mode and "weights" not in requires,
        tuple(f"{rollout_correction.KEY}.{key}" for key in keys),
        f"in bypass mode the ratio in {loss} is pi / mu itself, and a weight on top would count it twice",
    )


def surprises(config: PPOConfig) -> list[str]:
    """Returns warnings about chosen parts whose combination does what few users expect."""
    actor, correction, found = config.actor_rollout_ref.actor, config.algorithm.rollout_correction, []
    name, loss = actor.kl_loss_type, actor.policy_loss.loss_mode
    if actor.use_kl_loss and "value_only" in KL_ESTIMATORS.row(name).requires:
        found.append(
            f"{_ACTOR}.kl_loss_type={name}: its value estimates the KL, its gradient does not lower it as the KL's would; "
            f"{name}+ has the same value and the gradient of the KL"
        )
    if correction.rollout_is and not correction.bypass_mode and "rollout_log_probs" in POLICY_LOSSES.row(loss).requires:
        found.append(
            f"{rollout_correction.KEY}.rollout_is={correction.rollout_is}: {_ACTOR}.policy_loss.loss_mode={loss} compares with "
            "the rollout policy itself; weights pi_old / mu on top count that twice; leave rollout_is null (rollout_rs is fine)"
        )
    return found


def _knob_names(registry: Registry[Any], name: str) -> frozenset[str]:
    knobs = registry.knobs_class(name)
    return frozenset(getattr(knobs, "__dataclass_fields__", ()))


def import_plugins(modules: Sequence[str]) -> list[str]:
    """Imports the user's modules, so that their registered parts are known, and returns the problems."""
    problems = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # a plugin is foreign code: whatever it raises belongs to its name
            problems.append(f"trainer.plugins: importing {name!r} failed: {type(error).__name__}: {error}")
    return problems


def check_names(config: PPOConfig) -> list[str]:
    """Returns the problems of registered parts: unknown names, missing packages, and knobs that a part does not have."""
    algorithm, actor, reward = config.algorithm, config.actor_rollout_ref.actor, config.reward_model
    engine = resolve_engine_name(config.actor_rollout_ref.rollout.name)
    estimators = estimators_of(config)
    named: list[tuple[str, Registry[Any], str]] = [
        *((f"{key}.adv_estimator", ADVANTAGE_ESTIMATORS, own.adv_estimator) for key, own in estimators.items()),
        ("algorithm.kl_penalty", KL_ESTIMATORS, algorithm.kl_penalty),
        (f"{_ACTOR}.policy_loss.loss_mode", POLICY_LOSSES, actor.policy_loss.loss_mode),
        (f"{_ACTOR}.kl_loss_type", KL_ESTIMATORS, actor.kl_loss_type),
        (f"{_ROLLOUT}.name", ROLLOUT_ENGINES, engine),
        ("reward_model.reward_manager", REWARD_MANAGERS, reward.reward_manager),
    ]
    problems = [problem for key, registry, name in named for problem in unknown(key, registry, name)]
    packages = ROLLOUT_ENGINES.row(engine).requires if engine in ROLLOUT_ENGINES else frozenset()
    if missing := [package for package in sorted(packages) if find_spec(package) is None]:
        free = ", ".join(name for name in ROLLOUT_ENGINES.names() if not ROLLOUT_ENGINES.row(name).requires)
        advice = f"bash scripts/setup_env.sh installs it; engines that do without: {free}"
        problems.append(f"{_ROLLOUT}.name={engine}: {', '.join(missing)} is not installed ({advice})")
    problems += check_trackers(config.trainer.logger)
    problems += sampler_problems(config.data)
    problems += target_problems("algorithm.group_filter", algorithm.group_filter) if algorithm.group_filter else []
    for key, registry, name, section, kwargs in (
        *((f"{key}.adv_kwargs", ADVANTAGE_ESTIMATORS, own.adv_estimator, own, own.adv_kwargs) for key, own in estimators.items()),
        (f"{_ACTOR}.policy_loss.kwargs", POLICY_LOSSES, actor.policy_loss.loss_mode, actor, actor.policy_loss.kwargs),
        ("reward_model.reward_kwargs", REWARD_MANAGERS, reward.reward_manager, reward, reward.reward_kwargs),
    ):
        problems += _check_knobs(key, registry, name, section, kwargs)
    return problems


def check_trackers(names: Sequence[str]) -> list[str]:
    """Returns the problems of trackers: unknown names and missing packages."""
    return [problem for name in names for problem in unknown("trainer.logger", TRACKERS, name)] + package_problems(names)


def check_login(config: PPOConfig | SFTConfig | DPOConfig | RMConfig) -> list[str]:
    """Returns the problems of the trackers' accounts.  It runs last, since it may ask the user to log in."""
    return login_problems(config.trainer.logger)


def _check_knobs(
    key: str, registry: Registry[Any], name: str, section: Any, kwargs: Mapping[str, Any], *, always: bool = False
) -> list[str]:
    """Returns the problems of a part's knobs.

    always: check them even where `kwargs` is empty and only the section's fields set knobs; that loads the algorithm's module.
    """
    if not (kwargs or always) or name not in registry:
        return []
    try:
        knobs_for(registry.knobs_class(name), section, kwargs, where=key)
    except ConfigError as error:
        return list(error.problems)
    return []


def check_data(data: DataConfig) -> list[str]:
    """Returns the problems of data files: missing or empty files, and missing columns."""
    given = [(split, files) for split, files in (("train", data.train_files), ("val", data.val_files)) if files]
    return [problem for split, files in given for problem in check_files(files, data.prompt_key, split)]


def check_demonstrations(data: SFTDataConfig) -> list[str]:
    """Checks as `check_data` does, for files with prompts and responses, or with whole conversations."""
    problems = []
    for split, files in (("train", data.train_files), ("val", data.val_files)):
        pairs = check_files(files, data.prompt_key, split, (data.response_key,)) if files else []
        if pairs and check_files(files, CONVERSATION_COLUMN, split, ()):
            problems += pairs
    return problems


def check_pairs(data: PreferenceDataConfig, margin_key: str | None = None) -> list[str]:
    """Checks as `check_data` does, for preference pairs, whose prompt column may be missing: answers may contain the prompt."""
    columns = {data.chosen_key: "data.chosen_key", data.rejected_key: "data.rejected_key"}
    columns |= {margin_key: "margin_key"} if margin_key else {}
    given = [(split, files) for split, files in (("train", data.train_files), ("val", data.val_files)) if files]
    return [problem for split, files in given for problem in check_columns(files, split, columns)]


def check_custom_reward(custom: CustomRewardConfig) -> list[str]:
    """Returns the problem of the user's reward file: it is missing or does not define the function.  The file is not run."""
    if custom.path is None:
        return []
    source = read_source(custom.path)
    if source.problem:
        return [f"custom_reward_function.path={custom.path}: {source.problem}"]
    problem = source.lacks(custom.name)
    return [f"custom_reward_function.name={custom.name}: {problem}"] if problem else []


def check_models(config: PPOConfig) -> list[str]:
    """Returns the problems of the policy's and the critic's folders, and of sizes that they do not support."""
    problems: list[str] = []
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    shape = read_shape(model, "actor_rollout_ref.model", problems)
    critic = config.critic.model
    if critic is not None and critic.path != model.path:
        read_shape(critic, "critic.model", problems)
    if shape is None:
        return problems
    if config.actor_rollout_ref.actor.prefix_packing:
        reasons = prefix_problems(read_model_values(str(model.path)), model.override_config)
        problems += [f"{_ACTOR}.prefix_packing=true: {reason}; set it to false" for reason in reasons]
    size, heads = rollout.tensor_model_parallel_size, shape.num_heads
    if heads % size:
        arithmetic = f"{heads} = {heads // size} x {size} + {heads % size}"
        problems.append(f"{_ROLLOUT}.tensor_model_parallel_size={size} does not divide the model's {heads} heads: {arithmetic}")
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    arithmetic = f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response}"
    return problems + check_length(shape, prompt + response, arithmetic, "actor_rollout_ref.model")


def check_engines(config: PPOConfig | SFTConfig | DPOConfig | RMConfig) -> list[str]:
    """Returns the problems of training engines: missing packages and models that they cannot train.

    A problem that several roles share is returned once.
    """
    by_fault: dict[tuple[str, ...], list[str]] = {}
    for engine in engines(config):
        model, ranks = engine.role_model, role_ranks(config.trainer, engine.role)
        missing = [name for name in sorted(TRAIN_ENGINES.row(model.strategy or "").requires) if find_spec(name) is None]
        needs = f"{', '.join(missing)} is not installed (bash scripts/setup_env.sh installs it)"
        absent = f"{model.strategy_key}={model.strategy}: {needs}"
        by_fault.setdefault((str(model.strategy), "installed"), [absent] if missing else [])
        if not check_section(engine.section, "", ranks):  # else the configuration's own rules name the sizes that do not fit
            nameless = tuple(_unfit(engine, ranks.count, ""))
            by_fault.setdefault((str(model.model.path), *nameless), _unfit(engine, ranks.count, engine.key))
    return [problem for problems in by_fault.values() for problem in problems]


def _unfit(engine: Engine, num_ranks: int, key: str) -> list[str]:
    """Returns the reasons in a local model's config.json why the engine cannot train it."""
    path = Path(engine.role_model.model.path or "").expanduser()
    judge = TRAIN_ENGINES.companion(engine.role_model.strategy or "", "problems")
    if judge is None or not engine.role_model.model.path:
        return []
    try:
        read_model_shape(path, engine.role_model.model.override_config)
        values = read_model_values(path, engine.role_model.model.override_config)
    except ConfigError:
        return []  # a hub name, or a problem that `read_shape` reports
    found: list[str] = judge(values, engine.section, num_ranks, where=key)
    return found


def check_scoring_models(config: PPOConfig) -> list[str]:
    """Returns the problems of the reward model and of the judge."""
    scoring, judge, problems = config.reward_model, config.reward_model.judge, list[str]()
    if scoring.enable:
        problems += _check_reward_model(scoring.model)
    if not judge.model.path:
        return problems
    for read in (lambda: read_prompt(judge.prompt_template), lambda: read_pattern(judge.score_pattern)):
        try:
            read()
        except ConfigError as error:
            problems += error.problems
    problems += unknown("reward_model.judge.name", ROLLOUT_ENGINES, resolve_engine_name(judge.name or ""))
    problems += model_problems(judge.name or "", judge.model.as_model(), where="reward_model.judge.name")
    shape = read_shape(judge.model.as_model(), "reward_model.judge.model", problems)
    if shape is not None:
        prompt, answer = judge.max_prompt_length, judge.max_tokens
        arithmetic = f"reward_model.judge.max_prompt_length={prompt} + reward_model.judge.max_tokens={answer} = {prompt + answer}"
        problems += check_length(shape, prompt + answer, arithmetic, "reward_model.judge.model")
    return problems


def _check_reward_model(model: ScoringModelConfig) -> list[str]:
    problems: list[str] = []
    shape = read_shape(model.as_model(), "reward_model.model", problems)
    given = model.input_tokenizer
    if given is not None and not Path(given).expanduser().is_dir() and not HUB_NAME.fullmatch(given):
        problems.append(f"reward_model.model.input_tokenizer={given}: no such folder (looked for {Path(given).resolve()})")
    if shape is None or model.path is None:
        return problems
    architectures, num_labels = read_labels(Path(model.path).expanduser())
    problem = reward_problem(model.path, architectures, num_labels)
    if problem is not None:
        problems.append(f"reward_model.model.path: {problem}")
    elif any(name.endswith(LANGUAGE_MODEL) for name in architectures):
        logger.warning(
            "reward_model.model.path=%s is a language model without a reward head: its scores come from random weights; train "
            "one with rlhub.trainer.main_rm", model.path
        )  # fmt: skip
    return problems


def check_machine(trainer: TrainerConfig) -> list[str]:
    """Returns the problems of this machine's GPUs: too few, or a torch or driver that cannot use them.

    The GPUs of a Ray cluster are checked when the job joins it.
    """
    if not _uses_gpus_here(trainer):
        return []
    found, wanted = count_gpus(), trainer.n_gpus_per_node
    if found == 0:
        return ["trainer.device=cuda: no GPU found on this machine; trainer.device=cpu runs without"]
    if not torch_has_cuda():
        return ["trainer.device=cuda: the installed torch is a CPU build: make the environment on a GPU machine"]
    if problem := driver_problem():
        return [f"trainer.device=cuda: {problem}; trainer.device=cpu runs without"]
    if wanted is not None and wanted > found:
        return [f"trainer.n_gpus_per_node={wanted}, but this machine has {found} GPUs"]
    return placement.on_machine(trainer, found)


def _uses_gpus_here(trainer: TrainerConfig) -> bool:
    """Returns True where all GPUs of the run are this machine's."""
    return trainer.device == "cuda" and _starts_cluster_here(trainer)


def _starts_cluster_here(trainer: TrainerConfig) -> bool:
    """Returns True where the run has this machine alone: it joins no cluster of others."""
    joins_cluster = "address" in trainer.ray_init or "RAY_ADDRESS" in os.environ
    return trainer.nnodes == 1 and not (joins_cluster and trainer.backend == "ray")


def _memory_problems(config: PPOConfig | SFTConfig | DPOConfig | RMConfig) -> list[str]:
    """Returns the problems of models and caches that exceed the memory of this machine's GPUs."""
    device_gb = gpu_memory_gb() if _uses_gpus_here(config.trainer) else None
    if device_gb is None or (problems := check_memory(config, device_gb)):
        return [] if device_gb is None else problems
    choose_recompute(config, device_gb)
    for line in estimate_memory(config, device_gb):
        logger.info(line)
    for sentence in warn_of_memory(config, device_gb):
        logger.warning(sentence)
    return []


def check_folders(trainer: TrainerConfig) -> list[str]:
    """Returns the problems of the run folder, which must be writable and hold no other files, and of the checkpoint to resume."""
    if not trainer.default_local_dir.strip():
        return ["trainer.default_local_dir is empty; name a folder for what the run writes, for example checkpoints/run"]
    problems = []
    folder = Path(trainer.default_local_dir)
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problems.append(f"trainer.default_local_dir={trainer.default_local_dir}: {existing} is not a folder we may write to")
    elif problem := RunFolder(folder).problem():
        problems.append(f"trainer.default_local_dir={trainer.default_local_dir}: {problem}")
    resume = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
    if resume and not CheckpointStore(folder).find(Path(resume)).is_dir():
        problems.append(f"trainer.resume_from_path={resume}: no such folder, neither from here nor in {folder.absolute()}")
    return problems


def check_replay(trainer: TrainerConfig) -> list[str]:
    """Returns the problem of a folder to replay from that has no recorded batches."""
    folder = Path(trainer.replay_from).expanduser() if trainer.replay_from else None
    if folder is None or any(folder.glob("step-*.safetensors")):
        return []
    found = "has no step-*.safetensors" if folder.is_dir() else "is no folder"
    return [f"trainer.replay_from={folder} {found}; name the folder `batches` of a run with trainer.record_batches=true"]
