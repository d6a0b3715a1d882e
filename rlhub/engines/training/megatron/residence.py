"""Emptying device memory between uses without touching a tensor: storages are copied out and back, so every view stays valid.

Megatron's parameters, gradients and masters are views of a few large buffers that optimizers and data parallelism refer to;
moving the tensors would cut those ties.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class _Stored:
    """An emptied storage; content: its bytes in host memory, None: it comes back as zeros."""

    storage: torch.UntypedStorage
    num_bytes: int
    content: Tensor | None


@dataclass(slots=True)
class HostCopies:
    """What lies in host memory at the moment."""

    stored: list[_Stored] = field(default_factory=list)

    def take_out(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Free the device memory behind the tensors.  keep=False: their values are not needed again."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                content = _bytes(storage, tensor.device).cpu() if keep else None
                if content is not None and tensor.device.type == "cpu":
                    content = content.clone()
                self.stored.append(_Stored(storage=storage, num_bytes=storage.nbytes(), content=content))
                storage.resize_(0)

    def bring_back(self) -> None:
        """Undo `take_out`."""
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
