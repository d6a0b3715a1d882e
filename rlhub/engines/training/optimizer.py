"""The parts that the optimizers of all training engines share: the rules of a step, and state in host memory.

    EngineOptimizer   the learning rate, clipping, and the decision to skip a step
    HostTensors       moves tensors that nothing else is a view of, such as optimizer states, to the device for one step
    HostCopies        empties the storages behind tensors without touching the tensors, so that every view stays valid; Megatron's
                      parameters, gradients and masters are views of a few large buffers

The learning rate is a pure function of the step, so a checkpoint saves none of it.  State waits in host memory so that a
rollout engine, or a pass that needs no optimizer state, can use the device's memory.
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
from rlhub.models.device_copies import CopyQueue, pinned

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of AdamW's state tensors, in torch and in checkpoints."""
HOST = torch.device("cpu")


class EngineOptimizer(ABC):
    """AdamW over all ranks of an engine.

    num_steps: the steps taken.
    num_skipped: the steps skipped.  The sum of both is the schedule's position.
    hosted: the state that is in host memory between steps.
    """

    hosted: HostTensors

    def __init__(self, config: OptimConfig) -> None:
        check_schedule(config)
        self.config = config
        self.num_steps = 0
        self.num_skipped = 0

    @torch.no_grad()
    def step(self, max_norm: float, *, loss_is_finite: bool) -> StepReport:
        """Clips the gradient and steps, unless gradient or loss is not finite; the schedule advances either way.

        Every rank calls it, and all ranks come to the same decision.
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
        """Returns the norm of the whole gradient, with every element counted once.  Every rank calls it."""

    @abstractmethod
    def apply(self, rate: float, scale: float | None) -> None:
        """Steps all weights with the learning rate `rate`.  scale: a factor of the gradient; None leaves it unchanged."""

    @abstractmethod
    def set_num_steps(self, num_steps: int) -> None:
        """Sets the number of steps taken, also for the bias corrections."""

    def scalar_state(self) -> dict[str, int | float]:
        """Implements TrainEngine.scalar_state."""
        return {"optimizer_steps": self.num_steps, "skipped_steps": self.num_skipped}

    def load_scalar_state(self, state: Mapping[str, int | float]) -> None:
        """Implements TrainEngine.load_scalar_state."""
        self.set_num_steps(int(state["optimizer_steps"]))
        self.num_skipped = int(state["skipped_steps"])


def check_schedule(config: OptimConfig) -> None:
    """Raises ConfigError if the schedule needs a total number of steps that is not set."""
    if config.total_training_steps is None and (
        config.lr_scheduler_type != "constant" or (config.lr_warmup_steps < 0 and config.lr_warmup_steps_ratio > 0)
    ):
        raise ConfigError("optim.total_training_steps is needed for a cosine schedule or lr_warmup_steps_ratio")


def learning_rate(config: OptimConfig, step: int) -> float:
    """Returns the learning rate of optimizer step number `step`, from 0.

    A linear warm-up reaches lr on its last step; then the rate stays constant, or follows a cosine down to min_lr_ratio * lr
    at total_training_steps.
    """
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


class HostTensors:
    """Keeps tensors in pinned host memory and brings them to a device for the time of a context.

    They stay the same objects, so an optimizer or a checkpoint that refers to them reads and writes them wherever their memory
    is.  They come back on a stream of their own, while the device computes what follows: who reads them on the host waits first.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._queue: CopyQueue | None = None
        for tensor in self._tensors:
            tensor.data = pinned(tensor.data)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Moves the tensors to the device inside the context, and back on exit with the values that were written there."""
        if not self._tensors:
            yield
            return
        self._queue = self._queue or CopyQueue(device)
        host_data = [tensor.data for tensor in self._tensors]
        try:
            for tensor, on_device in zip(self._tensors, self._queue.fetch(host_data), strict=True):
                tensor.data = on_device
            yield
        finally:
            pairs = zip(self._tensors, host_data, strict=True)
            moved = [(tensor, on_host) for tensor, on_host in pairs if tensor.data_ptr() != on_host.data_ptr()]
            self._queue.store([(on_host, tensor.data) for tensor, on_host in moved])
            for tensor, on_host in moved:
                tensor.data = on_host

    def wait(self) -> None:
        """Waits until the values that were written on the device are in host memory."""
        if self._queue is not None:
            self._queue.wait()


@dataclass(slots=True)
class HostCopies:
    """Frees the device memory behind tensors and restores it.  stored: the storages that are empty at the moment."""

    stored: list[_EmptiedStorage] = field(default_factory=list)

    def empty(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Frees the device memory behind the tensors.  keep: False discards their values."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                content = _bytes(storage, tensor.device).cpu() if keep else None
                if content is not None and tensor.device.type == "cpu":
                    content = content.clone()
                self.stored.append(_EmptiedStorage(storage=storage, num_bytes=storage.nbytes(), content=content))
                storage.resize_(0)

    def restore(self) -> None:
        """Allocates the memory again; values that were not kept become zero."""
        for one in self.stored:
            one.storage.resize_(one.num_bytes)
            view = _bytes(one.storage, one.storage.device)
            if one.content is None:
                view.zero_()
            else:
                view.copy_(one.content)
        self.stored.clear()


@dataclass(slots=True, kw_only=True)
class _EmptiedStorage:
    """A storage without memory.  content: its bytes in host memory; None restores zeros."""

    storage: torch.UntypedStorage
    num_bytes: int
    content: Tensor | None


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Returns the storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
