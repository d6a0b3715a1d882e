"""The rules that the optimizers of all training engines share: the learning rate, clipping, and when a step is skipped.

The learning rate is a pure function of the step, so there is nothing of it to save.

§§ host_memory: Tensors in host memory while others need the device's: a rollout engine, or the passes that need no optimizer state.

HostTensors  moves tensors that nothing else is a view of: optimizer states, which are on the device for the optimizer step alone.
HostCopies   empties storages without touching a tensor, so that every view stays valid: Megatron's parameters, gradients and
             masters are views of a few large buffers that optimizers and data parallelism refer to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhub.config.sections.training import OptimConfig
from rlhub.engines.training.base import StepReport
from rlhub.errors import ConfigError

HOST = torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor with the same values on the device; the tensor itself if it is there."""
    return tensor.to(device)


class HostTensors:
    """Moves tensors to host memory.  They stay the same objects, so an optimizer or a checkpoint that refers to them reads and
    writes them wherever their memory is."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        for tensor in self._tensors:
            tensor.data = tensor.data.to(HOST)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Moves them to the device for the time of the context, and back with the values that were written there."""
        host_data = [tensor.data for tensor in self._tensors]
        try:
            for tensor, on_host in zip(self._tensors, host_data, strict=True):
                tensor.data = to_device(on_host, device)
            yield
        finally:
            for tensor, on_host in zip(self._tensors, host_data, strict=True):
                if tensor.data_ptr() != on_host.data_ptr():
                    on_host.copy_(tensor.data)
                    tensor.data = on_host


@dataclass(slots=True, kw_only=True)
class _EmptiedStorage:
    """content: the storage's bytes in host memory; None: it comes back as zeros."""

    storage: torch.UntypedStorage
    num_bytes: int
    content: Tensor | None


@dataclass(slots=True)
class HostCopies:
    """stored: the storages that are empty at the moment."""

    stored: list[_EmptiedStorage] = field(default_factory=list)

    def empty(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Frees the device memory behind the tensors.  keep=False: their values are not needed again."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                content = _bytes(storage, tensor.device).cpu() if keep else None
                if content is not None and tensor.device.type == "cpu":
                    content = content.clone()
                self.stored.append(_EmptiedStorage(storage=storage, num_bytes=storage.nbytes(), content=content))
                storage.resize_(0)

    def restore(self) -> None:
        """Reverses `empty`."""
        for one in self.stored:
            one.storage.resize_(one.num_bytes)
            view = _bytes(one.storage, one.storage.device)
            if one.content is None:
                view.zero_()
            else:
                view.copy_(one.content)
        self.stored.clear()


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


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
