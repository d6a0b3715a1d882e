"""The root of `python -m rlhub.trainer.main_sft`'s configuration, with its section `data`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlhub.config.schema import PositiveInt, PositiveOrInf, Seed
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, OptimConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class SFTDataConfig:
    train_files: str | list[str] | None = None
    """Training rows: parquet or jsonl, one path or a list. Required."""
    val_files: str | list[str] | None = None
    """Validation rows, same form; null: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt (text or chat messages), whose tokens have no loss."""
    response_key: str = "response"
    """Column with the response, whose tokens have the loss."""
    max_length: PositiveInt = 1024
    """Longest prompt and response together, in tokens."""
    train_batch_size: PositiveInt = 256
    """Rows in an optimizer step, over all ranks."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass of a rank; null: on GPUs use_dynamic_bsz decides, on CPU the rank's whole share at once."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens instead of rows; null: on GPUs, unless micro_batch_size_per_gpu is set."""
    max_token_len_per_gpu: PositiveInt | None = None
    """With use_dynamic_bsz: largest number of tokens in a forward pass of a rank, at least max_length; null: 16384, or max_length
    if that is more."""
    truncation: Literal["error", "left", "right"] = "error"
    """For a row over max_length, error: stop; left, right: cut that end away."""
    shuffle: bool = True
    """Draw a new order in every epoch, from data.seed."""
    seed: Seed = 1
    """Seed of the order of the rows."""


@dataclass(slots=True, kw_only=True)
class SFTConfig:
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-4))
    strategy: Strategy = "fsdp2"
    """Training engine: fsdp2 (fsdp means the same) reads fsdp_config, megatron reads `megatron`."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    grad_clip: PositiveOrInf = 1.0
    """Largest gradient norm of an optimizer step; inf: no limit."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def section(self) -> Section:
        """The section that the engine reads."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)
