"""Copies between host memory and a device that nobody waits for.

A copy from ordinary host memory makes the host wait for all that the device has to do before it, also where the copy is asked
not to block; a copy from pinned memory is queued like any other work.  torch keeps a pinned block until the copy that reads it is
done (its caching host allocator), so the caller may drop it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device, without waiting for the copy; the tensor itself if it is there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pinned(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory that a GPU can read and write by itself, or where there is no GPU the tensor on the CPU."""
    if not torch.cuda.is_available():
        return tensor.to("cpu")
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def streams_of(device: torch.device) -> Any:
    """Returns the module with the device's streams, such as torch.cuda; None for the CPU, which has none."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


class CopyQueue:
    """Copies between a device and pinned host memory on a stream of their own, beside what the device computes.

    The device waits for what is fetched, and the host for nothing but `wait`.  On CPU copies are done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._streams = device, streams_of(device)
        self._stream: Any = None if self._streams is None else self._streams.Stream(device)
        self._stored: Any = None

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors on the device, for what is computed from now on; on CPU the tensors themselves."""
        if self._streams is None:
            return [tensor.to(self.device) for tensor in tensors]
        found = [torch.empty_like(tensor, device=self.device) for tensor in tensors]
        self._copy(zip(found, tensors, strict=True))
        self._streams.current_stream(self.device).wait_stream(self._stream)
        return found

    def store(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Starts to copy tensors of the device, as they are after all that was computed so far, to host memory.

        pairs: (in host memory, on the device).  The memory on the device may be freed at once.
        """
        self._copy(pairs)
        if self._streams is not None:
            self._stored = self._stream.record_event()

    def wait(self) -> None:
        """Waits until all that was stored is in host memory."""
        if self._stored is not None:
            self._stored.synchronize()
            self._stored = None

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copies each second tensor into the first, on this queue's stream if there is one, after what was computed so far."""
        if self._streams is None:
            for target, source in pairs:
                target.copy_(source)
            return
        self._stream.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                (target if target.device.type == self.device.type else source).record_stream(self._stream)
