"""Fills the settings that follow from others: a null in the configuration becomes the value for which it stands.

`derive` runs after loading and before the checks; a configuration built in code goes through it as well.  Values that only a
running part can know (steps in the run, the model's sizes, the engine behind `auto`) stay null.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from typing import Any, Literal

from rlhub.config.devices import count_gpus, torch_has_cuda
from rlhub.config.rules.asynchronous import is_async, is_collected
from rlhub.config.rules.embodied import derive_envs
from rlhub.config.sections.actor import ActorConfig, RefConfig
from rlhub.config.sections.ppo import CriticConfig, PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import MegatronConfig

MAX_REWARD_WORKERS = 4  # scoring is light; more processes mostly cost memory
PASS_TOKENS = 16384
"""Tokens of a forward pass on a GPU, unless the user sets them: enough to keep it busy, while a whole mini-batch at once
(256 prompts x 8 samples of 1,000 tokens are 2 million) fits into no GPU's memory."""


@functools.singledispatch
def derive(config: Any) -> None:
    """Fills the open settings of `config` in place; a class without rules here has none."""


@derive.register
def _(config: PPOConfig) -> None:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    rollout, reference, critic = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref, config.critic
    derive_trainer(config.trainer)
    if actor.loss_scale_factor is None:
        actor.loss_scale_factor = float(config.data.max_response_length)
    _passes(config)
    _log_prob_from_actor(rollout, actor)
    _log_prob_from_actor(reference, actor)
    if reference.fsdp_config is None:
        reference.fsdp_config = dataclasses.replace(actor.fsdp_config)
    if reference.megatron is None:
        reference.megatron = _megatron_of(actor)
    if critic.model is None:
        critic.model = dataclasses.replace(model)
    if critic.model.lora_adapter_path == model.lora_adapter_path:
        critic.model.lora_adapter_path = None  # a policy's adapter has no head for values
    _critic_from_actor(critic, actor)
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_prompt_length + config.data.max_response_length
    _episodes(config)
    derive_envs(config)
    _reward_model_from_actor(config)
    if config.reward_model.num_workers is None:
        config.reward_model.num_workers = min(MAX_REWARD_WORKERS, os.cpu_count() or 1)


@derive.register
def _(config: SFTConfig) -> None:
    derive_trainer(config.trainer)
    _supervised_passes(config, 1)


@derive.register
def _(config: DPOConfig) -> None:
    derive_trainer(config.trainer)
    _supervised_passes(config, 2)
    if config.ref_fsdp_config is None:
        config.ref_fsdp_config = dataclasses.replace(config.fsdp_config)
    if config.ref_megatron is None:
        config.ref_megatron = _megatron_of(config)


@derive.register
def _(config: RMConfig) -> None:
    derive_trainer(config.trainer)
    _supervised_passes(config, 2)


def derive_trainer(trainer: TrainerConfig) -> None:
    """Derives the device, the ranks per machine and the path of the run folder."""
    trainer.device = resolve_device(trainer.device)
    if trainer.n_gpus_per_node is None and trainer.controller == "multi" and not trainer.pools:
        started = os.environ.get("LOCAL_WORLD_SIZE")  # by torchrun
        trainer.n_gpus_per_node = int(started) if started else None
    if trainer.n_gpus_per_node is None:
        alone = trainer.device == "cpu" or trainer.backend == "local"
        trainer.n_gpus_per_node = 1 if alone else max(1, count_gpus())
    for name in ("project_name", "experiment_name"):  # the loader has resolved these where a configuration was composed
        placeholder = f"${{trainer.{name}}}"
        trainer.default_local_dir = trainer.default_local_dir.replace(placeholder, getattr(trainer, name))
    trainer.default_local_dir = os.path.expanduser(trainer.default_local_dir)
    if trainer.resume_from_path is not None:
        trainer.resume_from_path = os.path.expanduser(trainer.resume_from_path)


def resolve_device(device: Literal["auto", "cuda", "cpu"]) -> Literal["cuda", "cpu"]:
    """Returns the device on which a job computes; auto is cuda where this machine has GPUs and torch is a CUDA build."""
    if device != "auto":
        return device
    return "cuda" if count_gpus() > 0 and torch_has_cuda() else "cpu"


def _passes(config: PPOConfig) -> None:
    """Derives how forward passes are cut: on GPUs by tokens, where no number of rows is set.

    A role with its own number of rows keeps it, and follows the actor only where the user set the actor's use_dynamic_bsz.
    """
    actor, rollout, reference = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    critic, scoring = config.critic, config.reward_model
    if actor.use_dynamic_bsz is None:
        actor.use_dynamic_bsz = _by_tokens(config.trainer, actor.ppo_micro_batch_size_per_gpu)
        for part in (rollout, reference):
            if part.log_prob_use_dynamic_bsz is None and part.log_prob_micro_batch_size_per_gpu is not None:
                part.log_prob_use_dynamic_bsz = False
        if critic.use_dynamic_bsz is None and critic.ppo_micro_batch_size_per_gpu is not None:
            critic.use_dynamic_bsz = False
        if scoring.use_dynamic_bsz is None and scoring.micro_batch_size_per_gpu is not None:
            scoring.use_dynamic_bsz = False
    if actor.ppo_max_token_len_per_gpu is None:
        actor.ppo_max_token_len_per_gpu = max(PASS_TOKENS, config.data.max_prompt_length + config.data.max_response_length)


def _supervised_passes(config: SFTConfig | DPOConfig | RMConfig, sequences: int) -> None:
    """Derives what `_passes` does, for supervised training.  sequences: token sequences in a row of the data."""
    data = config.data
    if data.use_dynamic_bsz is None:
        data.use_dynamic_bsz = _by_tokens(config.trainer, data.micro_batch_size_per_gpu)
    if data.max_token_len_per_gpu is None:
        data.max_token_len_per_gpu = max(PASS_TOKENS, sequences * data.max_length)


def _by_tokens(trainer: TrainerConfig, rows: int | None) -> bool:
    return trainer.device == "cuda" and rows is None


def _log_prob_from_actor(part: RolloutConfig | RefConfig, actor: ActorConfig) -> None:
    if part.log_prob_micro_batch_size_per_gpu is None:
        part.log_prob_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    if part.log_prob_use_dynamic_bsz is None:
        part.log_prob_use_dynamic_bsz = actor.use_dynamic_bsz
    if part.log_prob_max_token_len_per_gpu is None:
        part.log_prob_max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu


def _critic_from_actor(critic: CriticConfig, actor: ActorConfig) -> None:
    if critic.strategy is None:
        critic.strategy = actor.strategy
    if critic.ppo_mini_batch_size is None:
        critic.ppo_mini_batch_size = actor.ppo_mini_batch_size
    if critic.ppo_micro_batch_size_per_gpu is None:
        critic.ppo_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    if critic.use_dynamic_bsz is None:
        critic.use_dynamic_bsz = actor.use_dynamic_bsz
    if critic.ppo_max_token_len_per_gpu is None:
        critic.ppo_max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu
    if critic.ppo_epochs is None:
        critic.ppo_epochs = actor.ppo_epochs
    if critic.fsdp_config is None:
        critic.fsdp_config = dataclasses.replace(actor.fsdp_config)
    if critic.megatron is None:
        critic.megatron = _megatron_of(actor)


def _reward_model_from_actor(config: PPOConfig) -> None:
    scoring, rollout, actor = config.reward_model, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if scoring.strategy is None:
        scoring.strategy = actor.strategy
    if scoring.megatron is None:
        scoring.megatron = _megatron_of(actor)
    if scoring.micro_batch_size_per_gpu is None:
        scoring.micro_batch_size_per_gpu = rollout.log_prob_micro_batch_size_per_gpu
    if scoring.use_dynamic_bsz is None:
        scoring.use_dynamic_bsz = rollout.log_prob_use_dynamic_bsz
    if scoring.forward_max_token_len_per_gpu is None:
        scoring.forward_max_token_len_per_gpu = rollout.log_prob_max_token_len_per_gpu
    if scoring.judge.name is None:
        scoring.judge.name = rollout.name


def _megatron_of(owner: ActorConfig | DPOConfig) -> MegatronConfig:
    """Returns a deep copy of the owner's section."""
    return copy.deepcopy(owner.megatron)


def _episodes(config: PPOConfig) -> None:
    """Derives how far generation runs ahead of training, the processes that run episodes, the timeout of an episode, and the
    requests of a replica where these decide the number of replicas."""
    trainer, rollout, agent = config.trainer, config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.agent
    if rollout.min_replicas is not None or rollout.max_replicas is not None:
        rollout.max_num_seqs = rollout.most_sequences
    if trainer.pipeline_depth is None:
        trainer.pipeline_depth = trainer.max_staleness
    if agent.num_workers is None:
        agent.num_workers = int(is_async(config) and not is_collected(config) and trainer.batches == "reference")
    if agent.max_concurrent is None:
        agent.max_concurrent = (trainer.max_staleness + 1) * config.data.train_batch_size
    if agent.min_samples is None:
        agent.min_samples = max(-(-rollout.n // 2), min(rollout.n, 2))
    if agent.episode_timeout_s is None:
        agent.episode_timeout_s = trainer.deadline_s.generate
