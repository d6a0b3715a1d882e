"""The table of training engines, and the construction of each role's engine from the configuration.

Importing this module loads neither torch nor an engine, so names can be checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhub.config.sections.ppo import ActorRolloutRefConfig, CriticConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.reward import RewardModelConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.registry import Registry

if TYPE_CHECKING:
    import torch

    from rlhub.engines.training.base import TrainEngine
    from rlhub.engines.training.micro_batch import MicroBatchConfig

EngineFactory = Callable[..., "TrainEngine"]
"""A factory with the signature of FSDPEngine: (model, section, optim, *, kind, device, temperature, micro_batch,
infer_micro_batch, grad_clip, seed).  section: the engine's own section of the configuration, by the table in
rlhub/config/sections/training.py."""

TRAIN_ENGINES: Registry[EngineFactory] = Registry("training engine")
"""`requires` names the Python packages that an engine needs.  A companion `problems`, which loads no torch, returns sentences
on why a model cannot be trained: (content of its config.json, section, number of ranks, *, where: the section's key) ->
sentences."""
TRAIN_ENGINES.add_lazy("fsdp2", "rlhub.engines.training.fsdp.engine:FSDPEngine")
TRAIN_ENGINES.add_lazy("fsdp", "rlhub.engines.training.fsdp.engine:FSDPEngine")
TRAIN_ENGINES.add_lazy(
    "megatron",
    "rlhub.engines.training.megatron.engine:MegatronEngine",
    requires={"megatron"},
    companions={"problems": "rlhub.models.megatron.checks:megatron_problems"},
)


def _micro_batch(rows: int | None, dynamic: bool | None, max_tokens: int | None) -> MicroBatchConfig:
    """Returns the limits of a micro-batch: tokens if `dynamic`, else rows."""
    from rlhub.engines.training.micro_batch import MicroBatchConfig  # imported here, because it loads torch

    return MicroBatchConfig(max_tokens=max_tokens) if dynamic else MicroBatchConfig(rows=rows)


def _or(value: int | None, default: int | None) -> int | None:
    return default if value is None else value


def build_policy_engine(config: ActorRolloutRefConfig, *, device: torch.device, seed: int, train: bool = True) -> TrainEngine:
    """Builds the actor's engine, not yet initialized.  train: False builds it without an optimizer."""
    actor, rollout = config.actor, config.rollout
    dynamic = actor.use_dynamic_bsz if rollout.log_prob_use_dynamic_bsz is None else rollout.log_prob_use_dynamic_bsz
    return TRAIN_ENGINES.get(actor.strategy)(
        config.model,
        actor.section,
        actor.optim if train else None,
        kind=config.model.policy_kind,
        device=device,
        temperature=rollout.temperature,
        micro_batch=_micro_batch(actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
        infer_micro_batch=_micro_batch(
            _or(rollout.log_prob_micro_batch_size_per_gpu, actor.ppo_micro_batch_size_per_gpu),
            dynamic,
            _or(rollout.log_prob_max_token_len_per_gpu, actor.ppo_max_token_len_per_gpu),
        ),
        grad_clip=actor.grad_clip,
        seed=seed,
    )


def build_reference_engine(config: ActorRolloutRefConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """Builds the frozen engine of the starting policy, or of the reference's own model, not yet initialized."""
    actor, ref = config.actor, config.ref
    dynamic = actor.use_dynamic_bsz if ref.log_prob_use_dynamic_bsz is None else ref.log_prob_use_dynamic_bsz
    return TRAIN_ENGINES.get(actor.strategy)(
        ref.frozen_model(config.model),
        ref.section(actor),
        None,
        kind=config.model.policy_kind,
        device=device,
        temperature=config.rollout.temperature,
        micro_batch=_micro_batch(
            _or(ref.log_prob_micro_batch_size_per_gpu, actor.ppo_micro_batch_size_per_gpu),
            dynamic,
            _or(ref.log_prob_max_token_len_per_gpu, actor.ppo_max_token_len_per_gpu),
        ),
        seed=seed,
    )


def build_value_engine(config: CriticConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """Builds the critic's engine, not yet initialized.  The configuration's derived fields must be set."""
    assert config.strategy is not None and config.model is not None
    return TRAIN_ENGINES.get(config.strategy)(
        config.model,
        config.section,
        config.optim,
        kind="value",
        device=device,
        micro_batch=_micro_batch(config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu),
        grad_clip=config.grad_clip,
        seed=seed,
    )


def build_reward_engine(config: RewardModelConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """Builds the engine of a frozen reward model, not yet initialized.  The configuration's derived fields must be set."""
    assert config.strategy is not None
    return TRAIN_ENGINES.get(config.strategy)(
        config.model.as_model(),
        config.section,
        None,
        kind="reward",
        device=device,
        micro_batch=_micro_batch(config.micro_batch_size_per_gpu, config.use_dynamic_bsz, config.forward_max_token_len_per_gpu),
        seed=seed,
    )


def build_sft_engine(config: SFTConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """Builds the engine of supervised fine-tuning, not yet initialized."""
    return _supervised_engine(config, config.model.policy_kind, device=device, seed=seed)


def build_dpo_engine(config: DPOConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """Builds the policy's engine of direct preference optimization, not yet initialized."""
    return _supervised_engine(config, "policy", device=device, seed=seed, sequences=2)


def build_dpo_reference_engine(config: DPOConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """Builds the frozen engine of direct preference optimization with the starting weights, not yet initialized."""
    return TRAIN_ENGINES.get(config.strategy)(
        config.model,
        config.ref_section,
        None,
        kind="policy",
        device=device,
        micro_batch=_supervised_micro_batch(config, 2),
        seed=seed,
    )


def build_rm_engine(config: RMConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """Builds the engine of a reward model that is trained, not yet initialized."""
    return _supervised_engine(config, "reward", device=device, seed=seed, sequences=2)


def _supervised_engine(
    config: SFTConfig | DPOConfig | RMConfig, kind: str, *, device: torch.device, seed: int, sequences: int = 1
) -> TrainEngine:
    """Builds an engine that trains on a data set.  sequences: the token sequences in one row of the data."""
    return TRAIN_ENGINES.get(config.strategy)(
        config.model,
        config.section,
        config.optim,
        kind=kind,
        device=device,
        micro_batch=_supervised_micro_batch(config, sequences),
        grad_clip=config.grad_clip,
        seed=seed,
    )


def _supervised_micro_batch(config: SFTConfig | DPOConfig | RMConfig, sequences: int) -> MicroBatchConfig:
    data = config.data
    rows = None if data.micro_batch_size_per_gpu is None else sequences * data.micro_batch_size_per_gpu
    return _micro_batch(rows, data.use_dynamic_bsz, data.max_token_len_per_gpu)
