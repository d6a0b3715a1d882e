"""Which training engines exist, and building each role's from the configuration.

Importing this module loads no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhub.config.critic import CriticConfig
from rlhub.config.dpo import DPOConfig
from rlhub.config.ppo import ActorRolloutRefConfig
from rlhub.config.reward import RewardModelConfig
from rlhub.config.rm import RMConfig
from rlhub.config.sft import SFTConfig
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.registry import Registry

if TYPE_CHECKING:
    import torch

    from rlhub.engines.training.base import TrainEngine

EngineFactory = Callable[..., "TrainEngine"]
"""Called as FSDPEngine is: (model, fsdp, optim, *, kind, device, temperature, micro_batch, infer_micro_batch, grad_clip,
seed)."""

TRAIN_ENGINES: Registry[EngineFactory] = Registry("training engine")
TRAIN_ENGINES.add_lazy("fsdp2", "rlhub.engines.training.fsdp.engine:FSDPEngine")
TRAIN_ENGINES.add_lazy("fsdp", "rlhub.engines.training.fsdp.engine:FSDPEngine")


def _micro_batch(rows: int | None, dynamic: bool | None, max_tokens: int | None) -> MicroBatchConfig:
    """By tokens if dynamic, else by rows."""
    return MicroBatchConfig(max_tokens=max_tokens) if dynamic else MicroBatchConfig(rows=rows)


def _or(value: int | None, default: int | None) -> int | None:
    return default if value is None else value


def build_policy_engine(config: ActorRolloutRefConfig, *, device: torch.device, seed: int, train: bool = True) -> TrainEngine:
    """The actor's engine, not yet initialized; train=False: without optimizer."""
    actor, rollout = config.actor, config.rollout
    dynamic = actor.use_dynamic_bsz if rollout.log_prob_use_dynamic_bsz is None else rollout.log_prob_use_dynamic_bsz
    return TRAIN_ENGINES.get(actor.strategy)(
        config.model,
        actor.fsdp_config,
        actor.optim if train else None,
        kind="policy",
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
    """A frozen engine with the starting weights, not yet initialized."""
    actor, ref = config.actor, config.ref
    dynamic = actor.use_dynamic_bsz if ref.log_prob_use_dynamic_bsz is None else ref.log_prob_use_dynamic_bsz
    return TRAIN_ENGINES.get(actor.strategy)(
        config.model,
        ref.fsdp_config or actor.fsdp_config,
        None,
        kind="policy",
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
    """The critic's engine, not yet initialized; the configuration's derived fields must be filled."""
    assert config.strategy is not None and config.model is not None and config.fsdp_config is not None
    return TRAIN_ENGINES.get(config.strategy)(
        config.model,
        config.fsdp_config,
        config.optim,
        kind="value",
        device=device,
        micro_batch=_micro_batch(config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu),
        grad_clip=config.grad_clip,
        seed=seed,
    )


def build_reward_engine(config: RewardModelConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """A frozen reward model's engine, not yet initialized; the configuration's derived fields must be filled."""
    return TRAIN_ENGINES.get(config.strategy)(
        config.model.as_model(),
        config.model.fsdp_config,
        None,
        kind="reward",
        device=device,
        micro_batch=_micro_batch(config.micro_batch_size_per_gpu, config.use_dynamic_bsz, config.forward_max_token_len_per_gpu),
        seed=seed,
    )


def build_sft_engine(config: SFTConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """The engine of supervised fine-tuning, not yet initialized."""
    return _supervised_engine(config, "policy", device=device, seed=seed)


def build_dpo_engine(config: DPOConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """The policy of direct preference optimization, not yet initialized."""
    return _supervised_engine(config, "policy", device=device, seed=seed, sequences=2)


def build_dpo_reference_engine(config: DPOConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """A frozen engine with the starting weights, not yet initialized."""
    assert config.ref_fsdp_config is not None, "derived when the configuration is loaded"
    return TRAIN_ENGINES.get("fsdp2")(
        config.model,
        config.ref_fsdp_config,
        None,
        kind="policy",
        device=device,
        micro_batch=_supervised_micro_batch(config, 2),
        seed=seed,
    )


def build_rm_engine(config: RMConfig, *, device: torch.device, seed: int) -> TrainEngine:
    """The reward model that is trained, not yet initialized."""
    return _supervised_engine(config, "reward", device=device, seed=seed, sequences=2)


def _supervised_engine(
    config: SFTConfig | DPOConfig | RMConfig, kind: str, *, device: torch.device, seed: int, sequences: int = 1
) -> TrainEngine:
    """sequences: token sequences in a row of the data."""
    return TRAIN_ENGINES.get("fsdp2")(
        config.model,
        config.fsdp_config,
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
