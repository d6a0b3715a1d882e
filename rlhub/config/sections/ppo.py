"""The root of `python -m rlhub.trainer.main_ppo`'s configuration, with its sections `data` and `critic`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import PositiveInt, PositiveOrInf, Seed
from rlhub.config.sections.actor import ActorConfig, RefConfig
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.config.sections.env import EnvConfig
from rlhub.config.sections.reward import CustomRewardConfig, RewardModelConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, OptimConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class DataConfig:
    train_files: str | list[str] | None = None
    """Training prompts: parquet or jsonl, one path or a list. Required."""
    val_files: str | list[str] | None = None
    """Validation prompts, same form; null: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string or a list of chat messages."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens; filter_overlong_prompts and truncation decide what happens to longer ones."""
    max_response_length: PositiveInt = 512
    """Largest number of tokens that are generated for a prompt."""
    train_batch_size: PositiveInt = 1024
    """Prompts in a training step (each is sampled rollout.n times)."""
    val_batch_size: PositiveInt | None = None
    """Prompts generated at once in validation; null: the whole set."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """For a prompt over max_prompt_length, error: stop; left, right, middle: cut that part away."""
    filter_overlong_prompts: bool = False
    """Leave out prompts over max_prompt_length, and log their number, before truncation applies."""
    shuffle: bool = True
    """Draw a new order in every epoch, from data.seed."""
    seed: Seed = 1
    """Seed of the order of the prompts."""
    sampler: str = "uniform"
    """Sampler of the prompts: uniform (each once an epoch), curriculum (by measured pass rate), mixture (of sources, by
    data.sources.<name>.weight), or a subclass of rlhub.data.samplers.Sampler of your own as path.py:Class."""
    sampler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the sampler; of curriculum: low, high, by, rate, revisit, retire_after (rlhub/data/README.md)."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Settings of the rows of one data_source: name -> {weight, reward, agent_name, adv_estimator, adv_kwargs, val_kwargs}, each
    of which may be left out (rlhub/data/README.md)."""
    apply_chat_template_kwargs: dict[str, Any] | None = None
    """Extra arguments of the tokenizer's chat template, for example {enable_thinking: false}."""


@dataclass(slots=True, kw_only=True)
class CriticConfig:
    strategy: Strategy | None = None
    """Training engine; null: the actor's."""
    model: ModelConfig | None = None
    """Model under the value head; fields that are not set follow actor_rollout_ref.model."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts in an optimizer step; null: the actor's."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass of a rank; null: the actor's."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens; null: as the actor."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """Largest number of tokens in a forward pass of a rank; null: the actor's."""
    ppo_epochs: PositiveInt | None = None
    """Passes over each batch; null: the actor's."""
    grad_clip: PositiveOrInf = 1.0
    """Largest gradient norm of an optimizer step; inf: no limit."""
    cliprange_value: PositiveOrInf = 0.5
    """Range around the old values to which the value loss clips the new ones; inf: no clipping."""
    fsdp_config: FSDPConfig | None = None
    """Sharding of the critic; fields that are not set follow the actor. critic.model.fsdp_config is read too."""
    megatron: MegatronConfig | None = None
    """The critic with strategy=megatron; fields that are not set follow the actor. The sizes must equal the actor's where both
    are in one process."""

    @property
    def section(self) -> Section:
        """The section that the critic's engine reads."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)


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
    env: EnvConfig = field(default_factory=EnvConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
