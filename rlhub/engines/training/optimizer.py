"""The rules that the optimizers of all training engines share: the learning rate, clipping, and when a step is skipped.

The learning rate is a pure function of the step, so there is nothing of it to save.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from rlhub.config.sections.training import OptimConfig
from rlhub.engines.training.base import StepReport
from rlhub.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of AdamW's state, in torch and in checkpoints."""


class EngineOptimizer(ABC):
    """AdamW over all ranks of an engine.  num_steps: taken; num_skipped: skipped; their sum is the schedule's position."""

    def __init__(self, config: OptimConfig) -> None:
        check_schedule(config)
        self.config = config
        self.num_steps = 0
        self.num_skipped = 0

    @torch.no_grad()
    def step(self, max_norm: float, *, loss_is_finite: bool) -> StepReport:
        """Clips and steps unless the gradient or loss is not finite.

        The schedule advances either way.  Every rank calls, and all come to the same decision.
        """
        rate, norm = learning_rate(self.config, self.num_steps + self.num_skipped), self.grad_norm()
        skipped = not (loss_is_finite and math.isfinite(norm))
        if skipped:
            self.num_skipped += 1
        else:
            self.apply(rate, max_norm / (norm + 1e-6) if norm > max_norm else None)
            self.num_steps += 1
        return StepReport(grad_norm=norm, lr=rate, skipped=skipped)

    @abstractmethod
    def grad_norm(self) -> float:
        """Returns the norm of the whole gradient, every element counted once.  Every rank calls."""

    @abstractmethod
    def apply(self, rate: float, scale: float | None) -> None:
        """Steps all weights.  scale: multiplies the gradient first; None: as it is."""

    @abstractmethod
    def set_num_steps(self, num_steps: int) -> None:
        """Sets the number of steps taken, the bias corrections' too."""

    def scalar_state(self) -> dict[str, int | float]:
        """See TrainEngine.scalar_state."""
        return {"optimizer_steps": self.num_steps, "skipped_steps": self.num_skipped}

    def load_scalar_state(self, state: Mapping[str, int | float]) -> None:
        """See TrainEngine.load_scalar_state."""
        self.set_num_steps(int(state["optimizer_steps"]))
        self.num_skipped = int(state["skipped_steps"])


def check_schedule(config: OptimConfig) -> None:
    """Raises ConfigError if the schedule needs a length that is not known."""
    if config.total_training_steps is None and (
        config.lr_scheduler_type != "constant" or (config.lr_warmup_steps < 0 and config.lr_warmup_steps_ratio > 0)
    ):
        raise ConfigError("optim.total_training_steps is needed for a cosine schedule or lr_warmup_steps_ratio")


def learning_rate(config: OptimConfig, step: int) -> float:
    """Returns the rate of optimizer step number `step` (from 0): linear warm-up that reaches lr on its last step, then constant
    or a cosine down to min_lr_ratio * lr at total_training_steps."""
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
