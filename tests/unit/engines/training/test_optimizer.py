from __future__ import annotations

import math

import pytest

from rlhub.config.sections.training import OptimConfig
from rlhub.engines.training.optimizer import learning_rate


def rates(steps: int, **config: object) -> list[float]:
    return [learning_rate(OptimConfig(lr=2.0, **config), step) for step in range(steps)]


def test_constant_and_warmup() -> None:
    assert rates(3) == [2.0] * 3
    assert rates(4, lr_warmup_steps=4) == [0.5, 1.0, 1.5, 2.0]
    assert rates(3, lr_warmup_steps_ratio=0.2, total_training_steps=10) == [1.0, 2.0, 2.0]
    assert rates(2, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5, total_training_steps=10) == [2.0, 2.0]


def test_cosine_ends_at_its_floor() -> None:
    got = rates(9, lr_scheduler_type="cosine", lr_warmup_steps=2, total_training_steps=6, min_lr_ratio=0.1)
    expected = [1.0, 2.0] + [2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4))) for k in range(4)] + [0.2] * 3
    assert got == pytest.approx(expected)
