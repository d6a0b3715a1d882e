"""What every training engine is configured with: optimizer and sharding; shared by actor, reference, critic and SFT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlhub.config.schema import IntOrOff, NonNegativeFloat, PositiveFloat, PositiveInt, UnitFloat


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate of AdamW. RL of large models: 1e-6; LoRA or tiny models: 1e-4 and more."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; norms and biases are exempt."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's two moment decays, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """AdamW's denominator offset."""
    lr_warmup_steps: IntOrOff = -1
    """Optimizer steps of linear warm-up; -1: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: UnitFloat = 0.0
    """Warm-up as a share of all optimizer steps; read if lr_warmup_steps is -1."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    min_lr_ratio: UnitFloat = 0.0
    """Where the cosine ends, as a share of lr."""
    total_training_steps: PositiveInt | None = None
    """Length of the schedule in optimizer steps; null: the run's own."""


@dataclass(slots=True, kw_only=True)
class FSDPConfig:
    param_offload: bool = False
    """Keep parameters in host memory while unused. When GPU memory does not suffice; costs time."""
    optimizer_offload: bool = False
    """Keep optimizer state in host memory between updates. When GPU memory does not suffice; costs time."""
    fsdp_size: IntOrOff = -1
    """Ranks that share one copy of the model; -1: all. Smaller (hybrid sharding): copies are replicated over the rest."""
    model_dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Dtype of the master weights. On GPUs the forward pass computes in bf16 either way; fp64 is for tests."""
