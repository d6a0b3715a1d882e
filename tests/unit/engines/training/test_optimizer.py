"""The learning rate of every engine, and moving storages to host memory and back."""

from __future__ import annotations

import math

import pytest
import torch

from rlhub.config.sections.training import OptimConfig
from rlhub.engines.training.optimizer import HostCopies, learning_rate


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


def test_views_survive_a_stay_in_host_memory() -> None:
    buffer, gradient = torch.arange(10.0), torch.ones(3)
    view, again = buffer[2:6].view(2, 2), buffer[4:]
    host = HostCopies()
    host.empty([view, again])  # one storage, moved once
    host.empty([gradient], keep=False)
    assert buffer.untyped_storage().nbytes() == gradient.untyped_storage().nbytes() == 0
    host.restore()
    assert torch.equal(buffer, torch.arange(10.0)) and torch.equal(view, torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    assert torch.equal(gradient, torch.zeros(3))
    again[0] = -1
    assert buffer[4] == -1 and not host.stored
