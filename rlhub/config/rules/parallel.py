"""How a training engine deals its model over ranks: which sizes fit together, and how many ranks get rows of their own.

ranks = tensor x pipeline x context x data parallel.  Only the data-parallel ranks divide a batch: the others of a copy of the
model work on the same rows.  Pure arithmetic; whether a model's own sizes fit is judged where its config.json is read.

§§ derive: Fills the settings that follow from others: a null in the configuration becomes the value it stands for.

Called after loading and before the checks; a configuration built in code goes through it as well.  What only a running
part can know (steps in the run, the model's sizes, the engine behind `auto`) stays null.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhub.config.devices import count_gpus, torch_has_cuda
from rlhub.config.sections.actor import ActorConfig, RefConfig
from rlhub.config.sections.ppo import CriticConfig, PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, Section

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_model_parallel_size",
    "expert_model_parallel_size",
)
"""What engines of one process have in common: their groups of ranks belong to the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The worker processes that hold a role.  name: "4 ranks", text: where that number comes from; both for messages."""

    count: int
    name: str
    text: str


def all_ranks(trainer: TrainerConfig) -> Ranks:
    """Every rank of the run."""
    assert trainer.n_gpus_per_node is not None, "derive first"
    count = trainer.nnodes * trainer.n_gpus_per_node
    sizes = f"trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    return Ranks(count=count, name=f"{count} ranks", text=f"{sizes} = {count} ranks")


@functools.singledispatch
def ranks_per_copy(section: Section) -> int:
    """Ranks that work on the same rows."""
    raise TypeError(f"no section of a training engine: {type(section).__name__}")


@ranks_per_copy.register
def _(section: FSDPConfig) -> int:
    return 1


@ranks_per_copy.register
def _(section: MegatronConfig) -> int:
    return section.tensor_model_parallel_size * section.pipeline_model_parallel_size * section.context_model_parallel_size


def data_parallel(section: Section, ranks: Ranks) -> Ranks:
    """The ranks that rows are divided over; where the sizes do not fit (which is reported), at least one."""
    share = ranks_per_copy(section)
    if share == 1:
        return ranks
    count = max(ranks.count // share, 1)
    name = f"{count} data-parallel ranks"
    return Ranks(count=count, name=name, text=f"{ranks.text} / {share} that share a copy of the model = {name}")


@functools.singledispatch
def check_section(section: Section, key: str, ranks: Ranks) -> list[str]:
    """What does not fit, in the section called `key` of a role on `ranks`."""
    raise TypeError(f"no section of a training engine: {type(section).__name__}")


@check_section.register
def _(section: FSDPConfig, key: str, ranks: Ranks) -> list[str]:
    size = section.fsdp_size
    if size == 0 or (size > 0 and ranks.count % size):
        return [f"{key}.fsdp_size={size} does not divide the {ranks.name}; -1 shards over all"]
    return []


@check_section.register
def _(section: MegatronConfig, key: str, ranks: Ranks) -> list[str]:
    tensor, pipeline = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    stages, experts = section.virtual_pipeline_model_parallel_size, section.expert_model_parallel_size
    problems = []
    share = ranks_per_copy(section)
    if ranks.count % share:
        sizes = f"tensor {tensor} x pipeline {pipeline} x context {section.context_model_parallel_size} = {share} ranks"
        problems.append(
            f"{key}: {sizes} hold a copy of the model, which does not divide {ranks.text}: {_divide(ranks.count, share)}"
        )
    elif (ranks.count // share) % experts:
        problems.append(
            f"{key}.expert_model_parallel_size={experts} does not divide the data-parallel ranks: "
            f"{data_parallel(section, ranks).text}, {_divide(ranks.count // share, experts)}"
        )
    if stages is not None and stages > 1 and pipeline == 1:
        problems.append(
            f"{key}.virtual_pipeline_model_parallel_size={stages} cuts the stages of a pipeline, but "
            "pipeline_model_parallel_size=1; set that to 2 or more, or this to null"
        )
    if section.sequence_parallel and tensor == 1:
        problems.append(
            f"{key}.sequence_parallel=true cuts what tensor-parallel ranks would hold twice, but tensor_model_parallel_size=1; "
            "leave it null"
        )
    return problems


def _divide(total: int, size: int) -> str:
    return f"{total} = {total // size} x {size} + {total % size}"


def check_adapters(section: Section, model: ModelConfig, key: str, strategy_key: str) -> list[str]:
    """key: the model's section.  Adapters exist in Hugging Face's layers only."""
    if model.lora_rank > 0 and isinstance(section, MegatronConfig):
        return [
            f"{key}.lora_rank={model.lora_rank}: the megatron engine trains all weights; set {strategy_key}=fsdp2, or lora_rank=0"
        ]
    return []


def check_shared_processes(sections: Mapping[str, Section]) -> list[str]:
    """Roles whose engines share processes share their groups of ranks.  sections: by key; the first is
    what the others must equal."""
    found = {key: section for key, section in sections.items() if isinstance(section, MegatronConfig)}
    problems = []
    (first, wanted), *others = list(found.items()) or [("", MegatronConfig())]
    for key, section in others:
        for name in SIZES:
            have, want = getattr(section, name), getattr(wanted, name)
            if have != want:
                problems.append(
                    f"{key}.{name}={have} but {first}.{name}={want}: both are in the same processes, whose groups of ranks they "
                    "share; leave it unset to follow"
                )
    return problems


MAX_REWARD_WORKERS = 4  # scoring is light; more processes mostly cost memory
PASS_TOKENS = 16384
"""Tokens of a forward pass on a GPU unless the user says otherwise: enough to keep it busy, while a whole mini-batch at once
(256 prompts x 8 samples of 1,000 tokens are 2 million) fits nowhere."""


@functools.singledispatch
def derive(config: Any) -> None:
    """Fill `config` in place; a class nobody registered has nothing to derive."""


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
    _critic_from_actor(critic, actor)
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_prompt_length + config.data.max_response_length
    _episodes(config)
    _reward_model_from_actor(config)
    if config.reward_model.num_workers is None:
        config.reward_model.num_workers = min(MAX_REWARD_WORKERS, os.cpu_count() or 1)


def _episodes(config: PPOConfig) -> None:
    """How far generation runs ahead, and for how long an episode may run."""
    trainer, agent = config.trainer, config.actor_rollout_ref.rollout.agent
    if trainer.pipeline_depth is None:
        trainer.pipeline_depth = trainer.max_staleness
    if agent.max_concurrent is None:
        agent.max_concurrent = (trainer.max_staleness + 1) * config.data.train_batch_size
    if agent.episode_timeout_s is None:
        agent.episode_timeout_s = trainer.deadline_s.generate


def _passes(config: PPOConfig) -> None:
    """How forward passes are cut: by tokens on GPUs, whose memory a whole mini-batch would exceed, where no number of rows is
    set.  Who has a number of its own does not follow an actor that nobody told to cut by tokens."""
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


def _by_tokens(trainer: TrainerConfig, rows: int | None) -> bool:
    return trainer.device == "cuda" and rows is None


@derive.register
def _(config: SFTConfig) -> None:
    derive_trainer(config.trainer)
    _supervised_passes(config, 1)


@derive.register
def _(config: RMConfig) -> None:
    derive_trainer(config.trainer)
    _supervised_passes(config, 2)


def _supervised_passes(config: SFTConfig | DPOConfig | RMConfig, sequences: int) -> None:
    """As `_passes`.  sequences: token sequences in a row of the data."""
    data = config.data
    if data.use_dynamic_bsz is None:
        data.use_dynamic_bsz = _by_tokens(config.trainer, data.micro_batch_size_per_gpu)
    if data.max_token_len_per_gpu is None:
        data.max_token_len_per_gpu = max(PASS_TOKENS, sequences * data.max_length)


@derive.register
def _(config: DPOConfig) -> None:
    derive_trainer(config.trainer)
    _supervised_passes(config, 2)
    if config.ref_fsdp_config is None:
        config.ref_fsdp_config = dataclasses.replace(config.fsdp_config)
    if config.ref_megatron is None:
        config.ref_megatron = _megatron_of(config)


def derive_trainer(trainer: TrainerConfig) -> None:
    """Device, ranks per machine, and the run folder's name."""
    if trainer.device == "auto":
        trainer.device = "cuda" if count_gpus() > 0 and torch_has_cuda() else "cpu"
    if trainer.n_gpus_per_node is None:
        alone = trainer.device == "cpu" or trainer.backend == "local"
        trainer.n_gpus_per_node = 1 if alone else max(1, count_gpus())
    for name in ("project_name", "experiment_name"):  # as the loader does it for a configuration that was composed
        placeholder = f"${{trainer.{name}}}"
        trainer.default_local_dir = trainer.default_local_dir.replace(placeholder, getattr(trainer, name))
    trainer.default_local_dir = os.path.expanduser(trainer.default_local_dir)
    if trainer.resume_from_path is not None:
        trainer.resume_from_path = os.path.expanduser(trainer.resume_from_path)


def _log_prob_from_actor(part: RolloutConfig | RefConfig, actor: ActorConfig) -> None:
    if part.log_prob_micro_batch_size_per_gpu is None:
        part.log_prob_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    if part.log_prob_use_dynamic_bsz is None:
        part.log_prob_use_dynamic_bsz = actor.use_dynamic_bsz
    if part.log_prob_max_token_len_per_gpu is None:
        part.log_prob_max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu


def _megatron_of(owner: ActorConfig | DPOConfig) -> MegatronConfig:
    """A copy that shares nothing with its original."""
    return copy.deepcopy(owner.megatron)


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
