"""The training engines of a configuration: the section and the ranks of each role, and the rules between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from rlhub.config.rules import placement
from rlhub.config.rules.parallel import Ranks, all_ranks, check_adapters, check_section, check_shared_processes
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, Section
from rlhub.config.sections.vla import problems_of

ONLY_ROLE = "model"
"""The role of a trainer with one model, which cannot be placed."""


@dataclass(slots=True, kw_only=True, frozen=True)
class RoleModel:
    """The model of a role and the name of its engine, each with the key that sets it."""

    model_key: str
    model: ModelConfig
    strategy_key: str
    strategy: str | None


@dataclass(slots=True, kw_only=True, frozen=True)
class Engine:
    """The training engine of one role.

    key: key of the section that it reads; unread: keys of the role's other sections; role: the name in trainer.placement.
    """

    role_model: RoleModel
    section: Section
    key: str
    unread: tuple[str, ...]
    role: str


def _engine(role_model: RoleModel, section: Section, role: str, prefix: str, fsdp_key: str = "fsdp_config") -> Engine:
    """Returns the engine of a role.  prefix: the part of the sections' keys before their own names."""
    keys = {FSDPConfig: prefix + fsdp_key, MegatronConfig: f"{prefix}megatron"}
    key = keys[type(section)]
    return Engine(role_model=role_model, section=section, key=key, unread=tuple(set(keys.values()) - {key}), role=role)


@functools.singledispatch
def engines(config: Any) -> list[Engine]:
    """Returns the engine of every role that trains or infers, the one that others follow first.  Needs a derived config."""
    raise TypeError(f"no training engines in {type(config).__name__}")


@engines.register
def _(config: PPOConfig) -> list[Engine]:
    parts, actor, critic = config.actor_rollout_ref, config.actor_rollout_ref.actor, config.critic
    root, model = "actor_rollout_ref.", critic.model or parts.model
    policy = RoleModel(model_key=f"{root}model", model=parts.model, strategy_key=f"{root}actor.strategy", strategy=actor.strategy)
    frozen = policy
    if parts.ref.model.path is not None:
        frozen = replace(policy, model_key=f"{root}ref.model", model=parts.ref.frozen_model(parts.model))
    value = RoleModel(model_key="critic.model", model=model, strategy_key="critic.strategy", strategy=critic.strategy)
    return [
        _engine(policy, actor.section, "actor", f"{root}actor."),
        _engine(frozen, parts.ref.section(actor), "reference", f"{root}ref."),
        _engine(value, critic.section, "critic", "critic."),
        *_reward_model(config),
    ]


def _reward_model(config: PPOConfig) -> list[Engine]:
    scoring, key = config.reward_model, "reward_model."
    if not scoring.enable:
        return []
    role_model = RoleModel(
        model_key=f"{key}model", model=scoring.model.as_model(), strategy_key=f"{key}strategy", strategy=scoring.strategy
    )
    return [_engine(role_model, scoring.section, "reward_model", key, "model.fsdp_config")]


@engines.register(SFTConfig)
@engines.register(RMConfig)
def _(config: SFTConfig | RMConfig) -> list[Engine]:
    return [_supervised(config)]


@engines.register
def _(config: DPOConfig) -> list[Engine]:
    trained = _supervised(config)
    return [trained, _engine(trained.role_model, config.ref_section, ONLY_ROLE, "ref_")]


def _supervised(config: SFTConfig | DPOConfig | RMConfig) -> Engine:
    role_model = RoleModel(model_key="model", model=config.model, strategy_key="strategy", strategy=config.strategy)
    return _engine(role_model, config.section, ONLY_ROLE, "")


def role_ranks(trainer: TrainerConfig, role: str) -> Ranks:
    """Returns the ranks of a role's pool."""
    if not placement.is_separate(trainer, role):
        return all_ranks(trainer)
    pool, name = placement.pool_of(trainer, role), f"trainer.pools.{placement.pool_name(trainer, role)}"
    text = f"{name}.nnodes={pool.nnodes} x {name}.n_gpus_per_node={pool.n_gpus_per_node} = {pool.ranks} ranks"
    return Ranks(count=pool.ranks, name=f"{pool.ranks} ranks of {name}", text=text)


def problems(config: PPOConfig | SFTConfig | DPOConfig | RMConfig) -> list[str]:
    """Returns the problems of each engine's sizes and adapters, and of engines that share processes.

    A problem that an engine only follows from another is returned once.
    """
    trainer, by_fault = config.trainer, dict[tuple[str, ...], list[str]]()
    pools: dict[str, dict[str, Section]] = {}
    for engine in engines(config):
        pool, ranks = placement.pool_name(trainer, engine.role), role_ranks(trainer, engine.role)
        pools.setdefault(pool, {})[engine.key] = engine.section
        by_fault.setdefault((pool, *check_section(engine.section, "", ranks)), check_section(engine.section, engine.key, ranks))
        role_model = engine.role_model
        adapters = check_adapters(role_model.model, role_model.model_key)
        by_fault.setdefault((f"adapter {role_model.model.lora_adapter_path}",), adapters)
        by_fault.setdefault((f"actions {role_model.model.vla}",), problems_of(role_model.model))
    found = [problem for faults in by_fault.values() for problem in faults]
    return found + [problem for sections in pools.values() for problem in check_shared_processes(sections)]
