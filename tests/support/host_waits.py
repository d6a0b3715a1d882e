"""Finds the operations by which the host waits for a device: reading a number, asking for sizes that follow from numbers, and
copies that block.

The device `meta` stands for a GPU: what computes on it has no numbers to read, and copies to it are seen with their arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive")
"""Operations whose result is a number, or whose sizes follow from numbers."""
INDEXED = ("index", "index_put", "index_put_", "_unsafe_index")
"""Operations that look for the places of a mask where they are given one."""
COPIES = ("_to_copy", "copy_")


class HostWait(AssertionError):
    """The host waited for the device inside a micro-batch."""


class NoHostWaits(TorchDispatchMode):
    """Raises HostWait at each operation that makes the host wait for `device`; operations on the host's own tensors are free.

    copies: the number of tensors that were sent to the device.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device, self.copies = device, 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, tensors = (
            func._schema.name.removeprefix("aten::"),
            [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)],
        )
        there = [tensor for tensor in tensors if tensor.device.type == self.device]
        if there and name in READS:
            raise HostWait(f"{name} reads a number of the device")
        if there and name in INDEXED and any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise HostWait(f"{name} looks for the places of a mask on the device")
        if name in COPIES:
            self._copy(name, args, kwargs)
        return func(*args, **kwargs)

    def _copy(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
        if torch.device(target).type == source.device.type:
            return
        if source.device.type == self.device:
            raise HostWait(f"{name} copies from the device to the host")
        self.copies += 1
        if not (args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking")):
            raise HostWait(f"{name} to the device blocks")
