"""Checks that the models of a job have all their weights, in the driver, before any process starts.

It checks local folders only.  A model that a worker downloads, or reads on another machine, is checked there by its engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhub.config.rules.engines import Engine, engines
from rlhub.config.sections.ppo import ActorRolloutRefConfig, PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import check_weights
from rlhub.models.shape import POLICIES, ModelKind
from rlhub.models.tokenizer import check_tokenizer, load_tokenizer
from rlhub.trainer.ppo.requirements import requirements

KINDS: dict[str, ModelKind] = {"critic": "value", "reward_model": "reward"}
"""The kinds of model of the roles that hold no policy."""


def check_model_weights(config: PPOConfig | SFTConfig | DPOConfig | RMConfig) -> None:
    """Raises ConfigError with all problems of the models' weights and vocabularies, each under its key."""
    problems: list[str] = []
    known: list[tuple[ModelConfig, ModelKind]] = []
    for key, model, kind in _models(config):
        if model.path is None or not Path(model.path).expanduser().is_dir() or (model, kind) in known:
            continue
        known.append((model, kind))
        try:
            check_weights(model, kind)
            if kind in POLICIES:
                check_tokenizer(model)
        except ConfigError as error:
            problems += [f"{key}.path={model.path}: {text}" for text in error.problems]
    if isinstance(config, PPOConfig) and not problems:
        problems += _other_vocabulary(config.actor_rollout_ref)
    if problems:
        raise ConfigError(problems)


@functools.singledispatch
def _models(config: Any) -> Iterator[tuple[str, ModelConfig, ModelKind]]:
    """Yields key, model and kind of every model that the job loads."""
    raise TypeError(f"no models in {type(config).__name__}")


@_models.register
def _(config: PPOConfig) -> Iterator[tuple[str, ModelConfig, ModelKind]]:
    with_critic = requirements(config).values
    yield from (_entry(engine) for engine in engines(config) if with_critic or engine.role != "critic")
    judge = config.reward_model.judge.model
    if judge.path:
        yield "reward_model.judge.model", judge.as_model(), "policy"


@_models.register(SFTConfig)
@_models.register(DPOConfig)
def _(config: SFTConfig | DPOConfig) -> Iterator[tuple[str, ModelConfig, ModelKind]]:
    yield from map(_entry, engines(config))


@_models.register
def _(config: RMConfig) -> Iterator[tuple[str, ModelConfig, ModelKind]]:
    yield "model", config.model, "reward"


def _other_vocabulary(config: ActorRolloutRefConfig) -> list[str]:
    """Returns the problem of a reference of its own with other tokens than the policy: it would grade other texts."""
    policy, frozen = config.model, config.ref.frozen_model(config.model)
    if frozen.path == policy.path or not all(Path(path or "").expanduser().is_dir() for path in (policy.path, frozen.path)):
        return []
    own, other = (load_tokenizer(model.path, trust_remote_code=model.trust_remote_code).get_vocab() for model in (policy, frozen))
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if not differing:
        return []
    return [
        f"actor_rollout_ref.ref.model.path={frozen.path}: its tokenizer has other ids than that of the policy for "
        f"{len(differing)} tokens, for example {differing[0]!r}; choose a model of the same vocabulary"
    ]


def _entry(engine: Engine) -> tuple[str, ModelConfig, ModelKind]:
    role_model = engine.role_model
    return role_model.model_key, role_model.model, KINDS.get(engine.role, role_model.model.policy_kind)
