"""Wire form of tensors: pickle protocol 5 with out-of-band buffers.

torch pickles a tensor's whole storage through a byte stream, four copies in all; a PickleBuffer hands the transport the
bytes themselves.  The transport (Ray, or `pickle.dumps(..., buffer_callback=...)`) stores them once, and a reader on the
same machine maps them without a copy.  A slice costs its own rows only.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import torch
from torch import Tensor

from rlhub.protocol.columns import RAW_VIEWS
from rlhub.protocol.readonly_tensor import ReadOnlyTensor, guard

Packed = tuple[Any, ...]


def pack_tensor(tensor: Tensor, protocol: int = 5) -> Packed:
    """`tensor` (any device, dtype or strides) as a tuple whose bytes travel out of band from pickle protocol 5 on.

    Gradients do not travel.
    """
    tensor = tensor.detach()
    if tensor.is_nested:
        jagged: Any = tensor.cpu()
        return "jagged", pack_tensor(jagged.values(), protocol), pack_tensor(jagged.offsets(), protocol)
    if tensor.layout != torch.strided:
        return "other", tensor.cpu()
    plain = tensor.plain if isinstance(tensor, ReadOnlyTensor) else tensor
    dense = plain.cpu().resolve_conj().resolve_neg().contiguous()
    raw = dense.reshape(-1)
    array = raw.view(RAW_VIEWS.get(dense.dtype, dense.dtype)).numpy()
    if isinstance(tensor, ReadOnlyTensor):
        array.flags.writeable = False
    buffer: Any = array
    return "dense", dense.dtype, tuple(dense.shape), pickle.PickleBuffer(buffer) if protocol >= 5 else array


def unpack_tensor(packed: Packed) -> Tensor:
    """The tensor of `pack_tensor`: a read-only view where the received bytes are read-only, else a plain tensor over them."""
    tensor: Tensor
    if packed[0] == "jagged":
        tensor = torch.nested.nested_tensor_from_jagged(unpack_tensor(packed[1]).clone(), unpack_tensor(packed[2]).clone())
        return tensor
    if packed[0] == "other":
        tensor = packed[1]
        return tensor
    _, dtype, shape, buffer = packed
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    view = memoryview(buffer)
    with warnings.catch_warnings():
        # torch warns that it cannot refuse writes to read-only memory; the guard does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = torch.frombuffer(view, dtype=dtype).view(shape)
    return guard(tensor) if view.readonly else tensor
