"""The root of `python -m rlhub.trainer.main_ppo`'s configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhub.config.sections.actor import ActorConfig, RefConfig
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.config.sections.critic import CriticConfig
from rlhub.config.sections.data import DataConfig
from rlhub.config.sections.model import ModelConfig
from rlhub.config.sections.reward import CustomRewardConfig, RewardModelConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.trainer import TrainerConfig


@dataclass(slots=True, kw_only=True)
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(slots=True, kw_only=True)
class PPOConfig:
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
