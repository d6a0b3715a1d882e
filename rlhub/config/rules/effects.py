"""Warnings about settings that the user made and nothing reads, since the user believes that they have an effect."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from rlhub.config.load import flatten, free_keys
from rlhub.config.rules import asynchronous
from rlhub.config.rules.engines import engines
from rlhub.config.schema import setting, to_dict
from rlhub.config.sections import rollout_correction
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import MegatronConfig

Dead = tuple[bool, tuple[str, ...], str]
"""A rule: (whether it holds, keys without effect where it does, the reason).  A key that ends in `.` means all keys below it."""

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "actor_rollout_ref.rollout."


@functools.singledispatch
def dead(config: Any) -> list[Dead]:
    """Returns the rules for a configuration of its class."""
    return []


def without_effect(config: Any, set_keys: AbstractSet[str], rules: list[Dead] | None = None) -> list[str]:
    """Returns a warning for each setting in `set_keys` that is not read and differs from its default.

    rules: None: those of the configuration's class.
    """
    free = free_keys(type(config))
    default = dict(flatten(to_dict(type(config)()), free))
    chosen = dict(flatten(to_dict(config), free))
    found = [
        f"{setting(key, chosen.get(key))} has no effect: {why}"
        for holds, keys, why in (dead(config) if rules is None else rules)
        if holds
        for key in _matching(keys, set_keys)
        if key not in default or chosen.get(key) != default[key]
    ]
    return list(dict.fromkeys(found))


def _matching(keys: tuple[str, ...], set_keys: AbstractSet[str]) -> Iterator[str]:
    for key in sorted(set_keys):
        if any(key == wanted or (wanted.endswith(".") and key.startswith(wanted)) for wanted in keys):
            yield key


_ON_GPUS = ("gpu_memory_utilization", "enforce_eager", "free_cache_engine", "enable_expert_parallel")


@dead.register
def _(config: PPOConfig) -> list[Dead]:
    actor, critic, rollout = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.rollout
    control, val, in_reward = config.algorithm.kl_ctrl, rollout.val_kwargs, config.algorithm.use_kl_in_reward
    agent, env_hosts = rollout.agent, tuple(f"{_ROLLOUT}agent.env_host_{name}" for name in ("cpus", "gpus"))
    on_gpus = tuple(
        f"{_ROLLOUT}{name}" for name in ("gpu_memory_utilization", "enforce_eager", "free_cache_engine", "enable_expert_parallel")
    )
    return [
        (not actor.use_kl_loss, (f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type"), "actor_rollout_ref.actor.use_kl_loss is off"),
        (not in_reward, ("algorithm.kl_penalty", "algorithm.kl_ctrl."), "algorithm.use_kl_in_reward is off"),
        (control.type == "fixed", ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
         "algorithm.kl_ctrl.type is fixed"),
        (not config.algorithm.filtering,
         ("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
         "algorithm.filter_groups.enable is off"),
        *_correction(config),
        (actor.entropy_coeff != 0, (f"{_ACTOR}calculate_entropy",), "entropy_coeff is set, and the loss reads the entropy"),
        (actor.loss_agg_mode != "seq-mean-token-sum-norm", (f"{_ACTOR}loss_scale_factor",),
         "only loss_agg_mode=seq-mean-token-sum-norm reads it"),
        *_batching(bool(actor.use_dynamic_bsz), _ACTOR, "ppo_"),
        *_batching(bool(critic.use_dynamic_bsz), "critic.", "ppo_"),
        *_batching(bool(rollout.log_prob_use_dynamic_bsz), _ROLLOUT, "log_prob_"),
        *_batching(bool(config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz), _REF, "log_prob_"),
        *_model(config.actor_rollout_ref.model.lora_rank, "actor_rollout_ref.model."),
        (config.actor_rollout_ref.model.lora_rank == 0, (f"{_ROLLOUT}lora_sync",), "actor_rollout_ref.model.lora_rank is 0"),
        *_optimizer(config, f"{_ACTOR}optim."),
        *_optimizer(config, "critic.optim."),
        (not val.do_sample, tuple(f"{_ROLLOUT}val_kwargs.{name}" for name in ("temperature", "top_p", "top_k", "n")),
         "actor_rollout_ref.rollout.val_kwargs.do_sample is off, validation is greedy"),
        (not config.custom_reward_function.path, ("custom_reward_function.name",), "custom_reward_function.path is not set"),
        *_engines(config),
        *_rewards(config),
        (config.reward_model.on_error == "fail", ("reward_model.max_error_rate",),
         "reward_model.on_error=fail stops at the first"),
        (config.trainer.device == "cpu", on_gpus, "the run is on CPU"),
        (config.trainer.device == "cuda", (f"{_ROLLOUT}kv_cache_gb",), "the run is on GPUs, which read gpu_memory_utilization"),
        (not config.data.val_files and not config.env.val_scenes,
         ("data.val_batch_size", f"{_ROLLOUT}val_kwargs.", "trainer.log_val_generations"), "data.val_files is not set"),
        (config.env.name is None, ("env.",), "env.name is not set"),
        (config.env.reward != "srpo", ("env.srpo.",), "env.reward is not srpo"),
        (config.env.srpo.encoder != "vjepa2", ("env.srpo.path",), "env.srpo.encoder is not vjepa2"),
        (asynchronous.is_async(config) and not asynchronous.takes_turns(config), (f"{_ROLLOUT}free_cache_engine",),
         "replicas generate while the policy trains, or on devices of their own"),
        (True, asynchronous.unread(config), asynchronous.why_unread(config)),
        (not agent.num_env_hosts, env_hosts, f"{_ROLLOUT}agent.num_env_hosts is 0"),
        (config.trainer.backend == "local", env_hosts, "trainer.backend=local reserves nothing"),
        *_trainer(config),
    ]  # fmt: skip


@dead.register
def _(config: DPOConfig) -> list[Dead]:
    adapters = config.model.lora_rank > 0
    return [
        (
            adapters,
            ("ref_fsdp_config.", "ref_megatron."),
            "model.lora_rank is set: the reference is the policy with its adapters off",
        ),
        *_supervised(config),
    ]


@dead.register(SFTConfig)
@dead.register(RMConfig)
def _(config: SFTConfig | RMConfig) -> list[Dead]:
    return _supervised(config)


def _supervised(config: SFTConfig | DPOConfig | RMConfig) -> list[Dead]:
    dynamic = bool(config.data.use_dynamic_bsz)
    return [
        (not dynamic, ("data.max_token_len_per_gpu",), "data.use_dynamic_bsz is off"),
        (dynamic, ("data.micro_batch_size_per_gpu",), "data.use_dynamic_bsz cuts by tokens"),
        *_model(config.model.lora_rank, "model."),
        *_engines(config),
        *_optimizer(config, "optim."),
        *_trainer(config),
    ]


def _engines(config: PPOConfig | SFTConfig | DPOConfig | RMConfig) -> Iterator[Dead]:
    """Yields the rules for sections that a role's engine does not read, and for such settings of the sections it reads."""
    for engine in engines(config):
        chosen = f"{engine.role_model.strategy_key} is {engine.role_model.strategy}"
        yield True, tuple(f"{key}." for key in engine.unread), f"{chosen}, which reads {engine.key}"
        model, recomputed = engine.role_model.model_key, f"{engine.key}.recompute_granularity"
        if isinstance(engine.section, MegatronConfig):
            yield True, (f"{model}.use_remove_padding",), f"{chosen}, which always computes on packed rows"
        off = not engine.role_model.model.enable_gradient_checkpointing
        yield off, (recomputed,), f"{model}.enable_gradient_checkpointing is off"


def _correction(config: PPOConfig) -> list[Dead]:
    correction, where = config.algorithm.rollout_correction, f"{rollout_correction.KEY}."
    return [
        (correction.rollout_is is None, (f"{where}rollout_is_threshold", f"{where}rollout_is_batch_normalize"),
         f"{where}rollout_is is null"),
        (not correction.rollout_rs, (f"{where}rollout_rs_threshold",), f"{where}rollout_rs is null"),
    ]  # fmt: skip


def _rewards(config: PPOConfig) -> list[Dead]:
    scoring, where = config.reward_model, "reward_model."
    reward_model = (
        "model.",
        "megatron.",
        "weight",
        "strategy",
        "micro_batch_size_per_gpu",
        "use_dynamic_bsz",
        "forward_max_token_len_per_gpu",
    )
    function = tuple(f"{where}{name}" for name in ("reward_manager", "reward_kwargs.", "reward_kwargs", "timeout_s", "memory_gb"))
    return [
        (not scoring.enable, tuple(f"{where}{name}" for name in (*reward_model, "max_length")), "reward_model.enable is off"),
        (scoring.enable and not scoring.model.input_tokenizer, (f"{where}max_length",),
         "reward_model.model.input_tokenizer is not set, the policy's tokens are fed as they are"),
        (scoring.enable and not scoring.use_dynamic_bsz, (f"{where}forward_max_token_len_per_gpu",),
         "reward_model.use_dynamic_bsz is off"),
        (scoring.enable and bool(scoring.use_dynamic_bsz), (f"{where}micro_batch_size_per_gpu",),
         "reward_model.use_dynamic_bsz cuts by tokens"),
        (not scoring.judge.model.path, (f"{where}judge.",), "reward_model.judge.model.path is not set"),
        (scoring.function_weight == 0, (*function, f"{where}num_workers", "custom_reward_function."),
         "reward_model.function_weight is 0"),
    ]  # fmt: skip


def _batching(dynamic: bool, where: str, prefix: str) -> list[Dead]:
    switch = f"{where}{'log_prob_' if prefix == 'log_prob_' else ''}use_dynamic_bsz"
    return [
        (not dynamic, (f"{where}{prefix}max_token_len_per_gpu",), f"{switch} is off"),
        (dynamic, (f"{where}{prefix}micro_batch_size_per_gpu",), f"{switch} cuts by tokens"),
    ]


def _model(lora_rank: int, where: str) -> list[Dead]:
    return [(lora_rank == 0, (f"{where}lora_alpha", f"{where}target_modules"), f"{where}lora_rank is 0")]


def _optimizer(config: Any, where: str) -> list[Dead]:
    optim = config
    for name in where.rstrip(".").split("."):
        optim = getattr(optim, name)
    return [
        (optim.lr_warmup_steps >= 0, (f"{where}lr_warmup_steps_ratio",), f"{where}lr_warmup_steps is set"),
        (optim.lr_scheduler_type == "constant", (f"{where}min_lr_ratio",), f"{where}lr_scheduler_type is constant"),
    ]


def _trainer(config: PPOConfig | SFTConfig | DPOConfig | RMConfig) -> list[Dead]:
    trainer = config.trainer
    return [
        (trainer.resume_mode != "resume_path", ("trainer.resume_from_path",), f"trainer.resume_mode is {trainer.resume_mode}"),
        (trainer.backend == "local", ("trainer.ray_init.", "trainer.ray_init"), "trainer.backend=local starts no Ray"),
    ]
