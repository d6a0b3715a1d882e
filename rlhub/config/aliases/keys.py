"""The table of the established HybridFlow configuration's settings that rlhub does not have, and the answer to each.

A key is a pattern (`*` matches any text).  The first row that covers a key decides, so a single key comes before its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

ACTOR, REFERENCE = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
ROLLOUT, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
CORRECTION = "algorithm.rollout_correction."
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
MEGATRON_SECTIONS = tuple(f"{part}megatron." for part in (ACTOR, REFERENCE, "critic.", "reward_model.", ""))
TRAINED = (ACTOR, "critic.", "")
"""Prefixes of the keys of models that are trained."""

ANY = object()
"""Stands for every value in `KeyAlias.same`."""
AS_DEFAULT = object()
"""Stands in `ValueAlias.ours` for the default: the key counts as not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAlias:
    """A key of other frameworks.

    key: a pattern.  same: values that are the behaviour here anyway, which are accepted silently (a text may be a pattern).
    as_key: a setting of ours whose value is accepted too.  For other values, note: the reason why they are accepted and have no
    effect; instead: the reason why they are refused, and the replacement.
    """

    key: str
    same: tuple[Any, ...] = ()
    as_key: str = ""
    note: str = ""
    instead: str = ""

    def covers(self, key: str) -> bool:
        return fnmatchcase(key, self.key)

    def is_same(self, value: Any) -> bool:
        """Returns True for a value in `same`; 1 and True differ."""
        return any(item is ANY or _equal(item, value) for item in self.same)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueAlias:
    """Values of other frameworks, for the keys that match the pattern `key`, and our value for them."""

    key: str
    given: tuple[Any, ...]
    ours: Any

    def covers(self, key: str, value: Any) -> bool:
        return fnmatchcase(key, self.key) and any(_equal(item, value) for item in self.given)


def _equal(item: Any, value: Any) -> bool:
    if isinstance(item, str) and isinstance(value, str):
        return fnmatchcase(value, item)
    return type(item) is type(value) and bool(item == value)


_A, _REF, _R, _M = ACTOR, REFERENCE, ROLLOUT, MODEL


def _note(key: str, text: str, *same: Any) -> KeyAlias:
    """Returns the row of a key that is accepted with a warning; the values `same` are accepted silently."""
    return KeyAlias(key=key, same=same, note=text)


def _refused(key: str, text: str, *same: Any) -> KeyAlias:
    """Returns the row of a key that is refused; the values `same` are accepted silently."""
    return KeyAlias(key=key, same=same, instead=text)


def _silent(key: str) -> KeyAlias:
    """Returns the row of a key whose every value is accepted silently."""
    return KeyAlias(key=key, same=(ANY,))


def _notes(keys: Sequence[str], text: str, *same: Any) -> tuple[KeyAlias, ...]:
    return tuple(_note(key, text, *same) for key in keys)


def _own_pool(role: str) -> str:
    return f"a role gets processes of its own by trainer.pools.NAME.n_gpus_per_node=N trainer.placement.{role}=NAME"


_PER_GPU = "sizes over all ranks are not supported; use the key ending in _per_gpu"
_ACTORS_COMPILE = "the engine's fsdp_config.use_torch_compile decides"
_CHUNKS = "log-probs and entropy are computed in chunks, without kernels of another package"
_MEMORY = "to save memory use enable_gradient_checkpointing, use_dynamic_bsz with ppo_max_token_len_per_gpu, or param_offload"
_ALL_SAVED = "a checkpoint always holds weights, optimizer, the run's state and a Hugging Face folder"
_WEIGHTS = "the engine's weights come from the trainer, and are compared with it after every sync"
_PROFILER = "there is no profiler to switch on; trace.json in the run folder (for Perfetto) shows what ran when"
_PARALLEL = f"replicas are as many as ranks / {_R}tensor_model_parallel_size"
_IMAGES = "pictures are the column images of the data files, as a vision-language model's own image processor prepares them"
_REMOVED = "has other names here: rollout_is=token or sequence, rollout_is_threshold, rollout_rs, rollout_rs_threshold"
_OUTSIDE = "tokenizer and configuration are read from model.path"
_RM_ENGINE = (
    "the reward model is a classifier that the training engine runs; reward_model.micro_batch_size_per_gpu, use_dynamic_bsz and "
    "forward_max_token_len_per_gpu size its passes (a model that writes judgements is reward_model.judge)"
)
_COLUMNS = "name plain columns (data.prompt_key, data.response_key), or give whole conversations in a column `messages`"


def _ulysses(section: str) -> str:
    return (
        f"the fsdp engines have no sequence parallelism; set {section}strategy=megatron and "
        f"{section}megatron.context_model_parallel_size to that number instead"
    )


_MEGATRON: tuple[tuple[str, str, str, tuple[Any, ...]], ...] = (
    ("expert_tensor_parallel_size", "note", "each expert's matrices are cut over tensor_model_parallel_size ranks", (None,)),
    ("use_mbridge", "note", "", (ANY,)),
    ("vanilla_mbridge", "note", "", (ANY,)),  # of a bridge between weight names; ours has no alternatives
    (
        "use_dist_checkpointing",
        "refused",
        "checkpoints have one format, which any engine resumes from; the weights are read from model.path, a Hugging Face folder",
        (False, None),
    ),
    ("dist_checkpointing_path", "refused", "the weights are read from model.path, a Hugging Face folder", (None, "")),
    ("dist_checkpointing_prefix", "note", "", (ANY,)),
    ("seed", "note", "the run has one seed, trainer.seed", (None,)),
    ("use_remove_padding", "note", "the megatron engine always computes on packed rows", (True,)),
    ("load_weight", "refused", "the weights are always read from model.path", (True,)),
    ("forward_only", "note", "", (ANY,)),
    ("override_ddp_config*", "note", "gradients are reduced as use_distributed_optimizer says", (None, {})),
    ("override_mcore_model_config*", "refused", "its entries go to override_transformer_config", (None, {})),
    ("extra*", "refused", "entries of Megatron-core's TransformerConfig go to override_transformer_config", (None, {})),
)
"""Keys of other frameworks' megatron sections: name, whether other values are noted or refused, the reason, accepted values."""

FOREIGN = (
    _silent("*_target_"),
    # engines and optimizers
    *(
        (_note if kind == "note" else _refused)(f"{section}{key}", text, *same)
        for section in MEGATRON_SECTIONS
        for key, kind, text, same in _MEGATRON
    ),
    *(
        _refused(f"{role}optim.min_lr", "the lowest rate is optim.min_lr_ratio, a share of optim.lr", 0.0, 0, None)
        for role in TRAINED
    ),
    _refused("*optim.optimizer", "the optimizer is AdamW", "AdamW", "adamw", "adam"),
    _refused("*optim.optimizer_impl", "the optimizer is AdamW", "torch.optim"),
    _refused("*optim.num_cycles", "the cosine goes down once", 0.5),
    _note(
        "*optim.override_optimizer_config*",
        "the optimizer has the settings of `optim`; fsdp_config.optimizer_offload or megatron.optimizer_offload moves its state "
        "to host memory",
        None,
        {},
    ),
    _refused("*optim.lr_warmup_init", "the warm-up starts at 0", 0.0, 0),
    _refused("*optim.weight_decay_incr_style", "the weight decay stays as it is", "constant"),
    _refused(
        "*optim.lr_wsd_*", "the learning rate is constant or a cosine after the warm-up (lr_scheduler_type)", None, "exponential"
    ),
    _refused("*optim.use_checkpoint_opt_param_scheduler", "a run resumes with its own schedule", False),
    *(
        _refused(f"{part}ulysses_sequence_parallel_size", _ulysses(section), 1, None)
        for part, section in (
            (_A, _A),
            (f"{_A}fsdp_config.", _A),
            (_REF, _A),
            (f"{_REF}fsdp_config.", _A),
            ("critic.fsdp_config.", "critic."),
            ("critic.", "critic."),
            ("reward_model.", "reward_model."),
            ("", ""),
            ("engine.", ""),
        )
    ),
    *_notes(
        ("*fsdp_config.forward_prefetch", "*fsdp_config.wrap_policy*", "*fsdp_config.use_orig_params"),
        "the engine shards layer by layer and gathers the next one early by itself",
        False,
        None,
        0,
    ),
    _note("*fsdp_config.reshard_after_forward", "parameters are always sharded again after the forward pass", True),
    _refused("*fsdp_config.offload_policy", "set param_offload=true and optimizer_offload=true of the same section", False),
    _note(
        "*fsdp_config.mixed_precision*",
        "on GPUs passes compute in bf16 and gradients are reduced in fp32; master weights have model_dtype",
        None,
    ),
    _note("*fsdp_config.dtype", "on GPUs passes compute in bf16; master weights have model_dtype", "bfloat16", None),
    _note("*fsdp_config.grad_offload", "gradients are freed after each optimizer step", False),
    _note("*fsdp_config.seed", "the run has one seed, trainer.seed", None),
    _note("*fsdp_config.full_determinism", "runs on CPU repeat bit for bit; on GPUs kernels decide", False),
    *(_silent(f"*fsdp_config.{key}") for key in ("strategy", "forward_only")),
    *_notes(
        (f"{_REF}use_torch_compile", "reward_model.use_torch_compile", "*megatron.use_torch_compile"), _ACTORS_COMPILE, False
    ),
    *_notes(
        (
            "*entropy_from_logits_with_chunking",
            "*entropy_checkpointing",
            "*use_fused_kernels",
            "*fused_kernel_options*",
            "*sum_pi_squared_checkpointing",
        ),
        _CHUNKS,
        False,
        None,
    ),
    _note("*use_liger", "this version has no fused kernels of its own", False),
    *_notes(("*enable_activation_offload", "*tiled_mlp*"), _MEMORY, False, None),
    _note(
        "*use_prefix_grouper", "shared prompts are computed once a sample; enable_prefix_caching shares them in generation", False
    ),
    _note("*use_shm", "models and data are read from where they are", False),
    _refused("model.fsdp_config.*_offload", "set fsdp_config.param_offload and fsdp_config.optimizer_offload", False),
    _refused("model.fsdp_config.offload_params", "set fsdp_config.param_offload", False),
    _refused("engine", "the training engine is `strategy` (fsdp2 or megatron)", "fsdp*"),
    _refused("engine.*", "engines are configured by strategy, fsdp_config and megatron", None, False),
    # the actor, the reference and the critic
    KeyAlias(
        key=f"{_REF}strategy",
        same=(None,),
        as_key=f"{_A}strategy",
        instead=f"the reference uses the actor's engine, {_A}strategy",
    ),
    _silent("*rollout_n"),  # follows rollout.n
    *(
        _refused(f"{part}{size}micro_batch_size", _PER_GPU, None)
        for part, size in (
            (_A, "ppo_"),
            (_R, "log_prob_"),
            (_REF, "log_prob_"),
            ("critic.", "ppo_"),
            ("reward_model.", ""),
            ("data.", ""),
        )
    ),
    *_notes(
        ("critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu", "critic.forward_max_token_len_per_gpu"),
        "values are computed in the micro-batches of the critic's update (critic.ppo_micro_batch_size_per_gpu, "
        "ppo_max_token_len_per_gpu)",
        None,
    ),
    _note("critic.enable", "there is a critic where algorithm.adv_estimator needs one", None),
    _note("critic.shuffle", f"the critic takes the mini-batches of {_A}shuffle", False),
    _refused("critic.loss_agg_mode", "the value loss is a mean over tokens", "token-mean"),
    _note("critic.model.tokenizer_path", _OUTSIDE, None),
    *_notes((f"{_A}data_loader_seed", "critic.data_loader_seed"), "mini-batches are drawn from trainer.seed", None),
    _note(f"{_A}calculate_sum_pi_squared", "it is computed where algorithm.adv_estimator needs it", False),
    _note(f"{_A}freeze_vision_tower", "the vision part is trained with the rest", False),
    _refused("*router_replay.mode", f"the policy alone replays experts ({_A}router_replay)", "disabled", None),
    _silent("*router_replay.*"),
    _note("*load_weight", "the weights are always read from model.path", True),
    _refused(
        "*checkpoint.load_contents",
        "a run resumes with everything a checkpoint holds; a model alone is a model.path",
        ["model", "optimizer", "extra"],
        ["model", "optimizer", "extra", "hf_model"],
    ),
    _note("*checkpoint.save_contents", _ALL_SAVED, ["model", "optimizer", "extra"]),
    _note("*checkpoint.async_save", "a checkpoint is complete before the next step starts", False),
    # models
    *_notes(("*model.torch_dtype",), f"weights have {_A}fsdp_config.model_dtype in training and {_R}dtype in generation", None),
    *(_refused(f"*model.{key}", _OUTSIDE, None) for key in ("hf_config_path", "tokenizer_path")),
    _refused("*custom_chat_template", "put it into the tokenizer's files (chat_template.jinja in model.path)", None),
    _refused("data.chat_template", "put it into the tokenizer's files (chat_template.jinja in model.path)", None),
    _refused("*model.external_lib", "modules to import are named by trainer.plugins", None),
    _refused("*model.exclude_modules", "name those that get adapters in target_modules", None),
    _note("*model.lora.merge", f"{_R}lora_sync decides: merged (the default) or adapter"),
    _note("*model.lora.*", "adapters are those of lora_rank, lora_alpha and target_modules", None),
    _refused("*mtp.enable*", "this version trains and samples the next token alone", False),
    _silent("*mtp.*"),
    _refused("*rollout.mtp", "this version trains and samples the next token alone", None),
    _note("*nccl_timeout", "every wait has a deadline of its own, trainer.deadline_s.*"),
    # generation
    _note(f"{_R}load_format", _WEIGHTS),
    _note(f"{_R}layered_summon", f"weights move {_R}update_weights_bucket_mb at a time", False),
    _note(f"{_R}multi_stage_wake_up", f"the engine wakes as {_R}free_cache_engine says", False),
    _note(f"{_R}calculate_log_probs", "the log-probs of the sampled tokens are always recorded", True),
    _refused(f"{_R}logprobs_mode", "log-probs are those of the tempered distribution", "processed_logprobs"),
    _refused(f"{_R}do_sample", f"training samples; for validation there is {_R}val_kwargs.do_sample", True),
    *_notes(
        (
            f"{_R}disable_log_stats",
            f"{_R}scheduling_policy",
            f"{_R}cudagraph_capture_sizes",
            f"{_R}skip_tokenizer_init",
            f"{_R}limit_images",
            f"{_R}disable_log_requests",
            f"{_R}use_fire_sampling",
            f"{_R}trust_remote_code",
        ),
        "the engine is started with what its own settings here need",
        True,
        False,
        None,
        "fcfs",
    ),
    _note(f"{_R}data_parallel_size", _PARALLEL, 1, None),
    _note(
        f"{_R}expert_parallel_size", f"experts are cut over {_R}tensor_model_parallel_size ranks, as the other layers", 1, None
    ),
    _refused(f"{_R}pipeline_model_parallel_size", f"an engine's model is cut by {_R}tensor_model_parallel_size", 1, None),
    _refused(f"{_R}over_sample_rate", f"{_R}mode=async samples ahead: trainer.max_staleness", 0, 0.0),
    _refused(f"{_R}skip_rollout", "to train on recorded batches set trainer.replay_from", False, None),
    _silent(f"{_R}skip_dump_dir"),
    _silent(f"{_R}layer_name_map.*"),  # of weights, between two layouts; ours are known
    _note(f"{_R}checkpoint_engine.*", f"weights move {_R}update_weights_bucket_mb at a time", {}),
    _note(
        f"{_R}trace.*", "prompts.jsonl, generations/ and trace.json in the run folder say what became of each prompt", None, False
    ),
    _note(f"{_R}prometheus.*", "metrics.jsonl in the run folder has every metric", False, None),
    _refused(f"{_R}quantization_*", f"{_R}quantization=fp8 has no settings of its own", None),
    _note(f"{_R}engine_kwargs.*mm_*", _IMAGES, None),
    _note(f"{_R}engine_kwargs.sglang*", f"{_R}name is no SGLang", None, {}),
    _note(f"{_R}engine_kwargs.trtllm*", f"{_R}name is no TensorRT-LLM", None, {}),
    _note(f"{_R}engine_kwargs.*", f"the engine is built from the settings of {_R[:-1]} alone", None, {}),
    _refused(f"{_R}multi_turn.interaction_config_path", f"an environment is a workflow, {_R}agent.default_agent_loop", None),
    _refused(f"{_R}multi_turn.use_inference_chat_template", "the tokens trained on are those that were sampled", False),
    _silent(f"{_R}multi_turn.tokenization_sanity_check_mode"),  # no text is tokenized again, so there is nothing to check
    _note(f"{_R}multi_turn.tool_response_truncate_side", "of a result that is too long the middle is left out", "middle"),
    _note(f"{_R}multi_turn.num_repeat_rollouts", f"samples of a prompt are {_R}n", None),
    _refused(f"{_R}agent.agent_loop_*", f"name the workflow's class: {_R}agent.default_agent_loop=file.py:Class", None),
    _refused(f"{_R}agent.custom_async_server*", f"the engine is {_R}name", None, {}),
    # data
    _note("data.return_raw_chat", "the prompt's text is always carried", True),
    *_notes(
        ("data.return_raw_input_ids", "data.return_full_prompt", "data.return_multi_modal_inputs"),
        "a batch carries the prompt as text and as tokens",
        False,
        True,
    ),
    _note("data.gen_batch_size", "each round of dynamic sampling draws as many prompts as the batch still lacks"),
    *_notes(("data.image_key", "data.video_key", "data.image_patch_size"), _IMAGES, "images", "videos", 14, None),
    _refused("data.reward_fn_key", "the scorer is chosen by the column data_source", "data_source"),
    *(
        _refused(f"data.{key}", "every row of the files is read; give shorter files", -1, None)
        for key in ("train_max_samples", "val_max_samples")
    ),
    _refused("data.tokenizer", _OUTSIDE, None),
    KeyAlias(key="data.trust_remote_code", same=(False,), as_key=f"{_M}trust_remote_code", instead=f"set {_M}trust_remote_code"),
    _silent("data.custom_cls.name"),
    *(
        _refused(f"data.{key}.*", "rows come from parquet or jsonl files, in an order drawn from data.seed", None)
        for key in ("custom_cls", "sampler", "datagen")
    ),
    *_notes(("data.dataloader_num_workers", "data.filter_overlong_prompts_workers"), "prompts are read once, by the driver"),
    _note("data.validation_shuffle", "validation reads the whole set, whose order changes nothing", False),
    _refused("data.min_response_length", "an answer may be of any length", None, 0),
    _note("data.balance_dp_token", "each rank gets about the same number of tokens as it is", False),
    *(_refused(f"data.{key}", _COLUMNS, None) for key in ("prompt_dict_keys", "response_dict_keys")),
    _refused("data.multiturn.messages_key", "whole conversations are read from a column `messages`", "messages"),
    _refused("data.messages_key", "whole conversations are read from a column `messages`", "messages"),
    _note("data.multiturn.enable", "rows that have a column `messages` are read as conversations", True, False),
    *_notes(
        ("data.multiturn.*", "data.tools_key", "data.enable_thinking_key"),
        "templates are given messages alone",
        "tools",
        "enable_thinking",
        None,
    ),
    _refused("data.pad_mode", "rows are packed, or padded where model.use_remove_padding=false", "no_padding", "right", None),
    # rewards
    _silent(f"{OVERLONG}.log"),  # the penalty is always among the metrics
    KeyAlias(
        key="reward_model.reward_kwargs.max_resp_len",
        same=(None,),
        as_key="data.max_response_length",
        instead="the penalty ends at data.max_response_length",
    ),
    _note("reward_model.use_reward_loop", "rewards are computed in processes of their own in any case"),
    _note("reward_model.launch_reward_fn_async", "rewards are computed in processes of their own, beside the log-probs", False),
    _refused("*reward_loop_*", "a reward of your own is custom_reward_function.path", None, "register"),
    _note("reward_model.rollout.*", _RM_ENGINE),
    _note("reward.reward_model.rollout.*", _RM_ENGINE),
    _refused("*sandbox_fusion.url", "code is scored by a reward function of yours (custom_reward_function.path)", None),
    _silent("*sandbox_fusion.*"),
    _refused("reward_model.enable_resource_pool", _own_pool("reward_model"), False, None),
    *(_silent(f"reward_model.{size}") for size in ("n_gpus_per_node", "nnodes")),  # of a pool that is not enabled
    _refused("reward_model.param_offload", "set reward_model.model.fsdp_config.param_offload", False),
    _refused("custom_reward_function.reward_kwargs*", "give your function's further arguments defaults in its file", None, {}),
    _refused("reward_manager.source", "a reward of your own is custom_reward_function.path", "register"),
    _silent("reward_manager.module.*"),
    # algorithm
    *(
        _refused(f"algorithm.{key}", f"{CORRECTION}* {_REMOVED}", None, False)
        for key in ("rollout_is", "rollout_is_*", "rollout_rs", "rollout_rs_*", "rollout_token_veto_threshold")
    ),
    _refused(
        f"{CORRECTION}loss_type",
        f"the loss is {_A}policy_loss.loss_mode in every mode (for reinforce: loss_mode=reinforce)",
        "ppo_clip",
    ),
    _refused(f"{CORRECTION}use_policy_gradient", f"set {_A}policy_loss.loss_mode=reinforce", False, None),
    _refused(f"{CORRECTION}rollout_*threshold*", f'rollout_correction {_REMOVED} (a band is "lo_hi")', None),
    _refused("algorithm.use_pf_ppo", "samples are not drawn again by their reward", False),
    _silent("algorithm.pf_ppo.*"),
    # asynchronous training
    _refused(
        "async_training.*", f"set {_R}mode=async and trainer.max_staleness (how many policy versions a sample may be behind)"
    ),
    *(
        _refused(
            f"rollout.{size}",
            "generation gets ranks of its own by trainer.pools.generation.n_gpus_per_node=N trainer.placement.rollout=generation",
        )
        for size in ("nnodes", "n_gpus_per_node")
    ),
    *(
        _refused(f"rollout.{key}", f"the length of a run and its validations are trainer.{ours}")
        for key, ours in (
            ("total_rollout_steps", "total_training_steps"),
            ("total_epochs", "total_epochs"),
            ("test_freq", "test_freq"),
        )
    ),
    # the run
    _refused("actor_rollout_ref.hybrid_engine", _own_pool("rollout"), True),
    _note("trainer.use_legacy_worker_impl", "there is one implementation of the workers", "auto"),
    *_notes(
        ("trainer.rollout_data_dir", "trainer.validation_data_dir"),
        "samples of the texts are in the run folder's generations/ "
        "(trainer.log_val_generations), whole batches with trainer.record_batches=true",
        None,
    ),
    *_notes(
        ("trainer.ray_wait_register_center_timeout", "trainer.esi_redundant_time"),
        "every wait has a deadline of its own, trainer.deadline_s.*",
        0,
        None,
    ),
    _refused("trainer.default_hdfs_dir", "checkpoints go to trainer.default_local_dir, a folder that all nodes reach", None),
    _note("trainer.remove_previous_ckpt_in_save", "old checkpoints are removed by trainer.max_actor_ckpt_to_keep", False),
    _refused("trainer.val_only", "to validate without training: python -m rlhub.trainer.main_eval", False),
    _refused("trainer.del_local_ckpt_after_load", "checkpoints are only removed by trainer.max_actor_ckpt_to_keep", False),
    *_notes(
        (
            "*global_profiler*",
            "*.profiler*",
            "trainer.profile_*",
            "trainer.npu_profile*",
            "trainer.*nsight_options*",
            "npu_profile*",
            "ray_kwargs.timeline_json_file",
        ),
        _PROFILER,
        None,
        False,
        [],
        [-1, -1],
        {},
    ),
    _refused("transfer_queue.enable", "batches move between workers as they are made; there is nothing to switch on", False),
    _silent("transfer_queue.*"),
)
