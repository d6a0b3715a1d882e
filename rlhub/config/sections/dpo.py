"""The root of `python -m rlhub.trainer.main_dpo`'s configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhub.config.schema import PositiveFloat, PositiveOrInf, UnitFloat
from rlhub.config.sections.model import ModelConfig
from rlhub.config.sections.preference import PreferenceDataConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, OptimConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class DPOLossConfig:
    loss_type: str = "sigmoid"
    """Loss on a pair: sigmoid (DPO), ipo, hinge, or one of your own from a plugin."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference: smaller lets the policy go further. 0.01 to 0.5."""
    label_smoothing: UnitFloat = 0.0
    """Share of labels believed to be the wrong way round, below 0.5; above 0: conservative DPO."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the chosen loss, by its own names; checked by its own class."""


@dataclass(slots=True, kw_only=True)
class DPOConfig:
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dpo: DPOLossConfig = field(default_factory=DPOLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    strategy: Strategy = "fsdp2"
    """Training engine: fsdp2 (fsdp means the same) reads fsdp_config, megatron reads `megatron`."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    ref_fsdp_config: FSDPConfig | None = None
    """Sharding of the frozen reference; null: as fsdp_config. A LoRA run has none: its adapters are switched off instead."""
    ref_megatron: MegatronConfig | None = None
    """The reference with strategy=megatron; null: as `megatron`. The sizes must be, offloading may differ."""
    grad_clip: PositiveOrInf = 1.0
    """Largest gradient norm of an optimizer step; inf: no limit."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def section(self) -> Section:
        """What the engine is configured with."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)

    @property
    def ref_section(self) -> Section:
        """What the reference's engine is configured with."""
        return section_of(self.strategy, self.ref_fsdp_config, self.ref_megatron)
