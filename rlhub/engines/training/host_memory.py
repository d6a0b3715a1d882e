"""Tensors in host memory while others need the device's: a rollout engine, or the passes that need no optimizer state.

HostTensors  moves tensors that nothing else is a view of: optimizer states, which are on the device for the optimizer step alone.
HostCopies   empties storages without touching a tensor, so that every view stays valid: Megatron's parameters, gradients and
             masters are views of a few large buffers that optimizers and data parallelism refer to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
