"""Optimizer states in host memory, which are on the device for the optimizer step alone.

Inference, weight syncs and checkpoints need none of them, and at those times others need the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

HOST = torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same values there; the tensor itself if it is there."""
    return tensor.to(device)


class HostTensors:
    """Takes tensors to host memory.  They stay the objects they are, so whoever refers to them (an optimizer, a checkpoint)
    reads and writes them wherever their memory is."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        for tensor in self._tensors:
            tensor.data = tensor.data.to(HOST)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """While this lasts they are on the device; what was written to them there is kept."""
        homes = [tensor.data for tensor in self._tensors]
        try:
            for tensor, home in zip(self._tensors, homes, strict=True):
                tensor.data = to_device(home, device)
            yield
        finally:
            for tensor, home in zip(self._tensors, homes, strict=True):
                if tensor.data_ptr() != home.data_ptr():
                    home.copy_(tensor.data)
                    tensor.data = home
