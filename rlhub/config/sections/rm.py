"""The root of `python -m rlhub.trainer.main_rm`'s configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhub.config.schema import PositiveOrInf
from rlhub.config.sections.model import ModelConfig
from rlhub.config.sections.preference import PreferenceDataConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, OptimConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class RMConfig:
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    margin_key: str | None = None
    """Column with the number by which the chosen answer's score should win, for graded preferences; null: none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    strategy: Strategy = "fsdp2"
    """Training engine: fsdp2 (fsdp means the same) reads fsdp_config, megatron reads `megatron`."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    grad_clip: PositiveOrInf = 1.0
    """Largest gradient norm of an optimizer step; inf: no limit."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def section(self) -> Section:
        """What the engine is configured with."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)
