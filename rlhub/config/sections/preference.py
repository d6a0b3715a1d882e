"""The roots of `main_dpo`'s and `main_rm`'s configurations, with their sections `data` and `dpo`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import PositiveFloat, PositiveInt, PositiveOrInf, Seed, UnitFloat
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, OptimConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class PreferenceDataConfig:
    train_files: str | list[str] | None = None
    """Training pairs: parquet or jsonl, one path or a list. Required."""
    val_files: str | list[str] | None = None
    """Validation pairs, same form; null: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or chat messages; not read where both answers are whole conversations."""
    chosen_key: str = "chosen"
    """Column with the preferred answer: text, the assistant's message, or the whole conversation with it."""
    rejected_key: str = "rejected"
    """Column with the other answer, in the same form."""
    max_length: PositiveInt = 1024
    """Longest prompt and answer together, in tokens."""
    train_batch_size: PositiveInt = 64
    """Pairs in an optimizer step, over all ranks."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Pairs in a forward pass of a rank; null: on GPUs use_dynamic_bsz decides, on CPU the rank's whole share at once."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens instead of pairs; a pair is never cut. null: on GPUs, unless micro_batch_size_per_gpu is
    set."""
    max_token_len_per_gpu: PositiveInt | None = None
    """With use_dynamic_bsz: largest number of tokens in a forward pass of a rank, at least 2 x max_length; null: 16384, or
    2 x max_length if that is more."""
    truncation: Literal["error", "left", "right"] = "error"
    """For a pair over max_length, error: stop; left: cut both prompts alike at their start; right: cut the answers at their
    end."""
    shuffle: bool = True
    """Draw a new order in every epoch, from data.seed."""
    seed: Seed = 1
    """Seed of the order of the pairs."""


@dataclass(slots=True, kw_only=True)
class DPOLossConfig:
    loss_type: str = "sigmoid"
    """Loss on a pair: sigmoid (DPO), ipo, hinge, or one of your own from a plugin."""
    beta: PositiveFloat = 0.1
    """Strength of the KL constraint to the reference, usually 0.01 to 0.5; a smaller one lets the policy move further."""
    label_smoothing: UnitFloat = 0.0
    """Assumed probability that a label is flipped, below 0.5; above 0 it is conservative DPO."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the chosen loss, by its own names; the loss's own class checks them."""


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
    """Sharding of the frozen reference; null: as fsdp_config. A LoRA run does not read it: its reference is the policy with the
    adapters off."""
    ref_megatron: MegatronConfig | None = None
    """The reference with strategy=megatron; null: as `megatron`. Its sizes must equal those of `megatron`; offloading may
    differ."""
    grad_clip: PositiveOrInf = 1.0
    """Largest gradient norm of an optimizer step; inf: no limit."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def section(self) -> Section:
        """The section that the policy's engine reads."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)

    @property
    def ref_section(self) -> Section:
        """The section that the reference's engine reads."""
        return section_of(self.strategy, self.ref_fsdp_config, self.ref_megatron)


@dataclass(slots=True, kw_only=True)
class RMConfig:
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    margin_key: str | None = None
    """Column with the margin by which the chosen answer's score should exceed the other's, for graded preferences; null: no
    margin."""
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
        """The section that the reward model's engine reads."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)
