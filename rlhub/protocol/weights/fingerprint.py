"""Fingerprints of tensors, and a check that they are finite, at memory speed.

Equal bytes give equal fingerprints, and one changed element is noticed.  On CPU this is XXH3 (about twice the speed of a copy);
on accelerators a position-weighted checksum that runs where the data is.  The two differ, so only fingerprints of tensors on
the same kind of device may be compared.  They guard against mistakes, not against an adversary.

A norm reads every element once and is not finite if one is not: several times the speed of `isfinite`, whose result is a tensor
as long as its input.  Only where a norm says so are the elements looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # the checksum's temporary is 8 bytes an element: 128 MiB
POSITION_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio as a signed integer: spreads positions over all bits
WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> int:
    """Returns the fingerprint of the tensor's elements in row-major order, whatever its strides; up to 128 bits.

    Blocks until done.  Only a strided tensor is copied.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.device.type == "cpu":
        return xxhash.xxh3_128_intdigest(flat.view(torch.uint8).numpy().data)
    return checksum(flat)


def checksum(flat: Tensor) -> int:
    """Returns the sum over elements of (bits * an odd weight of the position) modulo 2^64, in torch operations.

    flat: one-dimensional, any device.  A change of one element always changes the sum, because an odd weight is
    invertible modulo 2^64; exchanged elements change it because the weights differ.
    """
    return int(_checksum(flat)) % (1 << 64)


def _checksum(flat: Tensor) -> Tensor:
    words = flat.view(WORD_TYPES[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), CHUNK_ELEMENTS):
        part = words[start : start + CHUNK_ELEMENTS]
        positions = torch.arange(start, start + part.numel(), dtype=torch.int64, device=flat.device)
        weights = positions.mul_(POSITION_FACTOR).bitwise_or_(1)
        total += weights.mul_(part).sum()
    return total


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Returns a signed 64-bit fingerprint of each contiguous tensor, for sending as int64; accelerators are waited for once.

    `tensors` may be a generator that reuses one buffer.
    """
    values: list[int] = []
    waiting: list[Tensor] = []
    for tensor in tensors:
        assert tensor.is_contiguous()
        if tensor.device.type == "cpu":
            # By address: the views that lead to a buffer cost more than the hash of a small tensor.
            memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
            values.append(xxhash.xxh3_64_intdigest(memory) - (1 << 63))
        else:
            waiting.append(_checksum(tensor.detach().view(-1)))
    return values + (torch.stack(waiting).tolist() if waiting else [])


def combine(parts: Iterable[tuple[str, int]]) -> str:
    """Returns one short hexadecimal fingerprint of named fingerprints; the order of the parts does not matter."""
    digest = xxhash.xxh3_64()
    for name, value in sorted(parts):
        digest.update(f"{name}={value:x};".encode())
    return digest.hexdigest()


@torch.no_grad()
def nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Returns the names of tensors with a NaN or infinite element, in the order given; an accelerator is waited for once.

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
