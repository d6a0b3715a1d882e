"""Whether tensors are finite, at memory speed.

A norm reads every element once and is not finite if one is not: several times the speed of `isfinite`, whose result is a tensor
as long as its input.  Only where a norm says so are the elements looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors with a NaN or infinite element, in the order given; an accelerator is waited for once.

    Several tensors may have one name, which is then returned once.
    """
    tensors = [(name, tensor.detach()) for name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    if not tensors:
        return []
    norms = torch._foreach_norm([tensor for _, tensor in tensors])
    if bool(torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).isfinite().all()):
        return []
    # A square may overflow where the element did not.
    return list(dict.fromkeys(name for name, tensor in tensors if not bool(tensor.isfinite().all())))
