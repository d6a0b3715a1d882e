"""How other HybridFlow frameworks spell settings and values that are ours too: the tables of `foreign`, data alone."""

from __future__ import annotations

from rlhub.config.aliases.row import ACTOR, AS_DEFAULT, CORRECTION, MEGATRON_SECTIONS, MODEL, OVERLONG, ROLLOUT, TRAINED, Spelling

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
    **{f"{model}lora.rank": f"{model}lora_rank" for model in (_M, "critic.model.", "model.")},
    **{f"{model}lora.alpha": f"{model}lora_alpha" for model in (_M, "critic.model.", "model.")},
    **{f"{model}lora.target_modules": f"{model}target_modules" for model in (_M, "critic.model.", "model.")},
}
"""Other spelling -> ours; everything below the key moves along."""

SPELLINGS = (
    Spelling(key=f"{CORRECTION}rollout_is", given=(False,), ours=None),
    Spelling(key=f"{CORRECTION}rollout_rs", given=(False,), ours=None),
    Spelling(key="*model_dtype", given=("bfloat16",), ours="bf16"),
    Spelling(key="*model_dtype", given=("float32",), ours="fp32"),
    Spelling(key="*optim.total_training_steps", given=(-1,), ours=None),
    Spelling(key="*optim.lr_warmup_steps", given=(None,), ours=AS_DEFAULT),
    Spelling(key="*optim.lr_scheduler_type", given=(None,), ours=AS_DEFAULT),
    Spelling(key="*recompute_granularity", given=(None,), ours=AS_DEFAULT),
    Spelling(key="data.seed", given=(None,), ours=AS_DEFAULT),
    Spelling(key="custom_reward_function.name", given=(None,), ours=AS_DEFAULT),
    Spelling(key="trainer.save_freq", given=(False,), ours=-1),
    Spelling(key="trainer.test_freq", given=(False,), ours=-1),
    Spelling(key="trainer.total_training_steps", given=(-1,), ours=None),
    Spelling(key="trainer.ray_init", given=(None,), ours=AS_DEFAULT),
    Spelling(key=f"{_R}max_num_batched_tokens", given=(None,), ours=AS_DEFAULT),
)
"""Values of ours that other command lines write otherwise."""

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
    ("trainer.device", "npu", "there are cuda and cpu; leave it unset, or set trainer.device=auto"),
    ("*strategy", "veomni", "no training engine of this version; set fsdp2 or megatron"),
    ("trainer.logger", "file", "metrics.jsonl in the run folder is always written; leave it out"),
    *(("reward_model.reward_manager", name, _REWARD_FUNCTION) for name in ("prime", "batch")),
)
"""Values (key, value, what to use instead) that deserve more than the list of what is known."""
