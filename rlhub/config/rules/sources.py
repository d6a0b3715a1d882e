"""The settings of data sources, `data.sources`, typed, with their rules, and those of the samplers that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlhub.config.load import build
from rlhub.config.names import target_problems
from rlhub.config.rules import asynchronous
from rlhub.config.schema import NonNegativeFloat
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.config.sections.ppo import DataConfig, PPOConfig
from rlhub.config.sections.rollout import ValSamplingConfig
from rlhub.registry import suggest
from rlhub.utils.user_code import absolute

_KEY, _SAMPLER = "data.sources", "data.sampler"
UNIFORM, CURRICULUM, MIXTURE = "uniform", "curriculum", "mixture"


@dataclass(slots=True, kw_only=True)
class SourceConfig:
    """One entry of data.sources, by the name in the rows' column data_source."""

    weight: NonNegativeFloat = 1.0
    """Share of the source in every batch with data.sampler=mixture, relative to the others; 0: it does not train."""
    reward: str | None = None
    """Reward function of the source's rows, path.py:function; null: that of custom_reward_function."""
    agent_name: str | None = None
    """Workflow of the source's episodes (rollout.mode=async), where the rows name none; null: that of rollout.agent."""
    adv_estimator: str | None = None
    """Advantage estimator of the source's rows, with statistics of these alone; null: all such sources share algorithm's."""
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the source's estimator; without adv_estimator they are on top of algorithm.adv_kwargs."""
    val_kwargs: dict[str, Any] = field(default_factory=dict)
    """Sampling of the source's validation prompts: what differs from rollout.val_kwargs, by its names."""


def sources_of(data: DataConfig) -> dict[str, SourceConfig]:
    """Returns the settings by source; wrong values of an entry are replaced by their defaults."""
    given = {name: value if isinstance(value, Mapping) else {} for name, value in data.sources.items()}
    return {str(name): build(SourceConfig, value, []) for name, value in given.items()}


def rewards_of(data: DataConfig) -> dict[str, str]:
    """Returns the reward functions of the sources that have their own, found from any folder."""
    return {name: absolute(source.reward) for name, source in sources_of(data).items() if source.reward}


def algorithms_of(config: PPOConfig) -> dict[str, AlgorithmConfig]:
    """Returns the section `algorithm` of each source that has an estimator or knobs of its own."""
    found = {}
    for name, source in sources_of(config.data).items():
        if source.adv_estimator is not None:
            found[name] = replace(config.algorithm, adv_estimator=source.adv_estimator, adv_kwargs=source.adv_kwargs)
        elif source.adv_kwargs:
            found[name] = replace(config.algorithm, adv_kwargs={**config.algorithm.adv_kwargs, **source.adv_kwargs})
    return found


def estimators_of(config: PPOConfig) -> dict[str, AlgorithmConfig]:
    """Returns the sections with the estimators of all rows by the key under which the user sets them, `algorithm` first."""
    return {"algorithm": config.algorithm, **{f"{_KEY}.{name}": own for name, own in algorithms_of(config).items()}}


def val_sampling(config: PPOConfig, source: str) -> ValSamplingConfig:
    """Returns the sampling of the validation prompts of a source."""
    general, own = config.actor_rollout_ref.rollout.val_kwargs, sources_of(config.data).get(source)
    return general if own is None else build(ValSamplingConfig, asdict(general) | own.val_kwargs, [])


def problems(config: PPOConfig) -> list[str]:
    """Returns the problems of sources and samplers that need no reading of files."""
    return [*_faulty(config.data), *_samplers(config), *_unread(config)]


def _faulty(data: DataConfig) -> Iterator[str]:
    fields = [field.name for field in dataclasses.fields(SourceConfig)]
    for name, value in data.sources.items():
        key = f"{_KEY}.{name}"
        if not isinstance(value, Mapping):
            yield f"{key}={value}: expected a mapping of {', '.join(fields)}; for example {_KEY}={{{name}: {{weight: 2}}}}"
            continue
        wrong: list[str] = []
        sampling = build(SourceConfig, value, wrong, prefix=f"{key}.").val_kwargs
        build(ValSamplingConfig, sampling, wrong, prefix=f"{key}.val_kwargs.")
        yield from [*_unknown(key, value, SourceConfig), *_unknown(f"{key}.val_kwargs", sampling, ValSamplingConfig), *wrong]


def _unknown(key: str, given: Mapping[str, Any], section: type[Any]) -> Iterator[str]:
    known = [field.name for field in dataclasses.fields(section)]
    for name in given:
        if name not in known:
            yield f"{key}.{name}: no such setting{suggest(str(name), known)}; known: {', '.join(known)}"


def _samplers(config: PPOConfig) -> Iterator[str]:
    """Yields the problems of runs in which a sampler has nothing to choose."""
    given = f"{_SAMPLER}={config.data.sampler}"
    if config.data.sampler == UNIFORM:
        return
    if config.env.name is not None:
        yield f"{given} with env.name={config.env.name}: scenes are no rows of a file; set {_SAMPLER}={UNIFORM}"
    if asynchronous.is_collected(config):
        collects = "actor_rollout_ref.rollout.trajectories_folder"
        yield f"{given} with {collects}: the job that collects draws the prompts; set {_SAMPLER}={UNIFORM}"
    if config.trainer.replay_from:
        yield f"{given} with trainer.replay_from: recorded batches come in their own order; set {_SAMPLER}={UNIFORM}"


def _unread(config: PPOConfig) -> Iterator[str]:
    """Yields the problems of settings of sources that this run would not read."""
    if config.data.sources and config.env.name is not None:
        yield f"{_KEY} with env.name={config.env.name}: scenes have no data_source; leave it out"
    for name, source in sources_of(config.data).items():
        if source.weight != 1 and config.data.sampler in (UNIFORM, CURRICULUM):
            given = f"{_KEY}.{name}.weight={source.weight:g} with {_SAMPLER}={config.data.sampler}"
            yield f"{given}: only {MIXTURE} has shares; set {_SAMPLER}={MIXTURE}"
        if source.agent_name and not asynchronous.is_async(config):
            given, mode = f"{_KEY}.{name}.agent_name={source.agent_name}", "actor_rollout_ref.rollout.mode"
            yield f"{given} with {mode}=sync: workflows run on the rollout service; set {mode}=async"
        if (source.adv_estimator or source.adv_kwargs) and config.trainer.replay_from:
            yield f"{_KEY}.{name}.adv_estimator with trainer.replay_from: recorded batches have no data_source; leave it out"
        if source.val_kwargs and config.data.val_files is None:
            yield f"{_KEY}.{name}.val_kwargs with data.val_files=null: nothing is validated; set data.val_files, or leave it out"
        if source.reward:
            yield from target_problems(f"{_KEY}.{name}.reward", source.reward)
