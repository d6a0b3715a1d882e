"""Section `critic`: the value model of PPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhub.config.schema import PositiveInt, PositiveOrInf
from rlhub.config.sections.model import ModelConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, OptimConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class CriticConfig:
    strategy: Strategy | None = None
    """Training engine; null: the actor's."""
    model: ModelConfig | None = None
    """The model under the value head; what is not set is actor_rollout_ref.model's."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts in an optimizer step; null: the actor's."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass of a rank; null: the actor's."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens; null: as the actor."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """Most tokens in a forward pass of a rank; null: the actor's."""
    ppo_epochs: PositiveInt | None = None
    """Passes over each batch; null: the actor's."""
    grad_clip: PositiveOrInf = 1.0
    """Largest gradient norm of an optimizer step; inf: no limit."""
    cliprange_value: PositiveOrInf = 0.5
    """Values may move this far from the old ones before the value loss clips; inf: it never does."""
    fsdp_config: FSDPConfig | None = None
    """Sharding of the critic; what is not set is the actor's. critic.model.fsdp_config is read too."""
    megatron: MegatronConfig | None = None
    """The critic with strategy=megatron; what is not set is the actor's. The sizes must be, where both are in one process."""

    @property
    def section(self) -> Section:
        """What the engine is configured with."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)
