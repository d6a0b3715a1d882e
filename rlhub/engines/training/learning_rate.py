"""The learning rate as a pure function of the step: the same for every training engine, and nothing to save."""

from __future__ import annotations

import math

from rlhub.config.sections.training import OptimConfig
from rlhub.errors import ConfigError


def check_schedule(config: OptimConfig) -> None:
    """Raises ConfigError if the schedule needs a length that is not known."""
    if config.total_training_steps is None and (
        config.lr_scheduler_type != "constant" or (config.lr_warmup_steps < 0 and config.lr_warmup_steps_ratio > 0)
    ):
        raise ConfigError("optim.total_training_steps is needed for a cosine schedule or lr_warmup_steps_ratio")


def learning_rate(config: OptimConfig, step: int) -> float:
    """Rate of optimizer step number `step` (from 0): linear warm-up that reaches lr on its last step, then constant or a
    cosine down to min_lr_ratio * lr at total_training_steps."""
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = math.ceil(config.lr_warmup_steps_ratio * (total or 0))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant" or total is None:
        return config.lr
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
