"""Translates keys and values of command lines that were written for other HybridFlow frameworks.

There are four kinds: aliases (another spelling of a key or value of ours), keys whose value is the behaviour here anyway
(accepted silently), keys that change nothing that is learned (accepted with a warning that has the reason), and keys of features
that this version does not have (an error that names a replacement, so that nobody believes the feature is on).  `keys` has the
last three.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rlhub.config.aliases.keys import (
    ACTOR,
    ANY,
    AS_DEFAULT,
    CORRECTION,
    FOREIGN,
    MEGATRON_SECTIONS,
    MODEL,
    OVERLONG,
    ROLLOUT,
    TRAINED,
    KeyAlias,
    ValueAlias,
)
from rlhub.config.schema import scalar, setting

_A, _R, _M = ACTOR, ROLLOUT, MODEL
_RECOMPUTE = ("override_transformer_config.recompute_granularity", "recompute_granularity")
_CUTS = ("tensor", "pipeline", "virtual_pipeline", "expert")
_LOSS_KNOBS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")

ALIASES = {
    "critic.model.fsdp_config": "critic.fsdp_config",
    "reward_model.model.megatron": "reward_model.megatron",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "dag.custom_pipeline_fn": "trainer.pipeline",
    "ray_kwargs.ray_init": "trainer.ray_init",
    "ray_init": "trainer.ray_init",
    "model.partial_pretrain": "model.path",
    "model.strategy": "strategy",
    "use_remove_padding": "model.use_remove_padding",
    f"{_A}use_remove_padding": f"{_M}use_remove_padding",
    f"{_R}prompt_length": "data.max_prompt_length",
    f"{_R}response_length": "data.max_response_length",
    f"{_R}update_weights_bucket_megabytes": f"{_R}update_weights_bucket_mb",
    f"{_R}checkpoint_engine.update_weights_bucket_megabytes": f"{_R}update_weights_bucket_mb",
    f"{_R}multi_turn.max_turns": f"{_R}multi_turn.max_assistant_turns",
    f"{_R}multi_turn.max_parallel_calls": f"{_R}agent.kwargs.max_parallel_calls",
    f"{_R}multi_turn.max_tool_response_length": f"{_R}agent.kwargs.max_tool_response_length",
    "data.tool_config_path": f"{_R}multi_turn.tool_config_path",
    **{f"{_A}{name}": f"{_A}policy_loss.kwargs.{name}" for name in ("tau_pos", "tau_neg")},
    **{f"{_A}policy_loss.{name}": f"{_A}policy_loss.kwargs.{name}" for name in _LOSS_KNOBS},
    **{f"{_A}{name}": f"{_A}policy_loss.kwargs.{name}" for name in _LOSS_KNOBS},
    f"{_A}loss_mode": f"{_A}policy_loss.loss_mode",
    f"{_A}router_replay.mode": f"{_A}router_replay",
    f"{_R}enable_rollout_routing_replay": f"{_A}router_replay",
    **{f"engine.{name}": f"fsdp_config.{name}" for name in ("fsdp_size", "param_offload", "optimizer_offload", "model_dtype")},
    **{f"engine.{name}_model_parallel_size": f"megatron.{name}_model_parallel_size" for name in _CUTS},
    "engine.context_parallel_size": "megatron.context_model_parallel_size",
    "engine.strategy": "strategy",
    "reward_model.overlong_buffer": OVERLONG,
    "reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    **{f"{section}context_parallel_size": f"{section}context_model_parallel_size" for section in MEGATRON_SECTIONS},
    **{f"{section}dtype": f"{section}model_dtype" for section in MEGATRON_SECTIONS},
    **{f"{section}{_RECOMPUTE[0]}": f"{section}{_RECOMPUTE[1]}" for section in MEGATRON_SECTIONS},
    **{f"{role}optim.lr_decay_style": f"{role}optim.lr_scheduler_type" for role in TRAINED},
    **{f"{role}optim.lr_scheduler": f"{role}optim.lr_scheduler_type" for role in TRAINED},
    **{f"{role}optim.warmup_style": f"{role}optim.lr_scheduler_type" for role in TRAINED},
    **{f"{role}optim.warmup_steps_ratio": f"{role}optim.lr_warmup_steps_ratio" for role in TRAINED},
    **{f"{role}optim.lr_decay_steps": f"{role}optim.total_training_steps" for role in TRAINED},
    **{f"{role}optim.clip_grad": f"{role}grad_clip" for role in TRAINED},
    **{f"{role}use_torch_compile": f"{role}fsdp_config.use_torch_compile" for role in TRAINED},
    **{f"{model}lora.rank": f"{model}lora_rank" for model in (_M, "critic.model.", "model.")},
    **{f"{model}lora.alpha": f"{model}lora_alpha" for model in (_M, "critic.model.", "model.")},
    **{f"{model}lora.target_modules": f"{model}target_modules" for model in (_M, "critic.model.", "model.")},
}
"""Other spellings of keys, and ours; keys below a spelling are translated with it."""

SPELLINGS = (
    ValueAlias(key=f"{CORRECTION}rollout_is", given=(False,), ours=None),
    ValueAlias(key=f"{CORRECTION}rollout_rs", given=(False,), ours=None),
    ValueAlias(key=f"{_A}router_replay", given=("R3", True), ours="rollout"),
    ValueAlias(key=f"{_A}router_replay", given=(False,), ours=AS_DEFAULT),
    ValueAlias(key="*model_dtype", given=("bfloat16",), ours="bf16"),
    ValueAlias(key="*model_dtype", given=("float32",), ours="fp32"),
    ValueAlias(key="*optim.total_training_steps", given=(-1,), ours=None),
    ValueAlias(key="*optim.lr_warmup_steps", given=(None,), ours=AS_DEFAULT),
    ValueAlias(key="*optim.lr_scheduler_type", given=(None,), ours=AS_DEFAULT),
    ValueAlias(key="*recompute_granularity", given=(None,), ours=AS_DEFAULT),
    ValueAlias(key="data.seed", given=(None,), ours=AS_DEFAULT),
    ValueAlias(key="custom_reward_function.name", given=(None,), ours=AS_DEFAULT),
    ValueAlias(key="trainer.save_freq", given=(False,), ours=-1),
    ValueAlias(key="trainer.test_freq", given=(False,), ours=-1),
    ValueAlias(key="trainer.total_training_steps", given=(-1,), ours=None),
    ValueAlias(key="trainer.ray_init", given=(None,), ours=AS_DEFAULT),
)
"""Values that other command lines spell in another way."""

_EXTERNAL_ENGINE = f"no engine of this version; set {_R}name=vllm (with {_R}mode=async too, where it serves single requests)"
_REWARD_FUNCTION = (
    "the reward function already runs in several processes, each with a deadline: set reward_model.reward_manager=naive"
)
REFUSED_VALUES: tuple[tuple[str, str, str], ...] = (
    (
        f"{_R}name",
        "sglang",
        f"{_EXTERNAL_ENGINE}, or for SGLang servers of another job {_R}name=remote {_R}remote.server=sglang "
        f"{_R}remote.urls=[...]",
    ),
    (f"{_R}name", "trtllm", _EXTERNAL_ENGINE),
    (
        f"{_A}router_replay",
        "R2",
        "the experts of the pass for old log-probs are not recorded; set rollout (R3), which replays the rollout's there, too",
    ),
    ("trainer.device", "npu", "there are cuda and cpu; leave it unset, or set trainer.device=auto"),
    ("*strategy", "veomni", "no training engine of this version; set fsdp2 or megatron"),
    ("trainer.logger", "file", "metrics.jsonl in the run folder is always written; leave it out"),
    *(("reward_model.reward_manager", name, _REWARD_FUNCTION) for name in ("prime", "batch")),
)
"""Refused values (key, value, replacement) whose error names more than the known values."""


def resolve_aliases(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the flat settings with every alias under our own key; two spellings with different values are a problem.

    An alias whose value is an interpolation is dropped: it says that the key follows another setting, as it does here.
    """
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        ours = _ours(key)
        if ours != key and _follows(value):
            continue
        value = _our_value(ours, value)
        if value is AS_DEFAULT:
            continue
        if ours in resolved and resolved[ours] != value:
            problems.append(f"{key}={value!r} and {ours}={resolved[ours]!r} are the same setting with different values")
        resolved[ours] = value
    return resolved


def _follows(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def _ours(key: str) -> str:
    for alias, ours in ALIASES.items():
        if key == alias or key.startswith(f"{alias}."):
            return ours + key[len(alias) :]
    return key


def _our_value(key: str, value: Any) -> Any:
    return next((spelling.ours for spelling in SPELLINGS if spelling.covers(key, value)), value)


def refused_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the messages for settings whose value only another framework has, by key."""
    return {
        key: f"{key}={value}: {instead}"
        for key, value in values.items()
        for pattern, refused, instead in REFUSED_VALUES
        if fnmatchcase(key, pattern) and refused in (value if isinstance(value, list) else [value])
    }


@functools.cache
def names_in_full(key: str) -> bool:
    """Returns True where the tables have exactly this key; patterns do not count inside a mapping of the user's own keys."""
    return key in ALIASES or any(row.key == key for row in FOREIGN)


@functools.cache
def _row(key: str) -> KeyAlias | None:
    return next((row for row in FOREIGN if row.covers(key)), None)


def judge(key: str, value: Any, said: Mapping[str, Any] | None = None) -> str | None:
    """Returns "" for a key of other frameworks with an accepted value, a message for another value, and None for an unknown key.

    said: all settings of the user.
    """
    row = _row(key)
    if row is None:
        return None
    if row.note or row.is_same(value) or _follows(value) or (row.as_key and (said or {}).get(row.as_key) == value):
        return ""
    harmless = " or ".join(scalar(item) for item in row.same if item is not ANY and _may_be_shown(item))
    return f"{setting(key, value)}: {row.instead}{f' (only {harmless} is accepted)' if harmless else ''}"


def _may_be_shown(value: Any) -> bool:
    """Returns True for a value that helps in a message: neither a pattern nor an empty text."""
    return value != "" and not (isinstance(value, str) and "*" in value)


def note(key: str, value: Any) -> str:
    """Returns the warning that an accepted key of other frameworks has no effect, or "" where its value is the behaviour here."""
    row = _row(key)
    if row is None or not row.note or row.is_same(value) or _follows(value):
        return ""
    return f"{setting(key, value)} has no effect: {row.note}"
