"""Replacing the memory behind an engine's weights, while every tensor object that reads them stays the same object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def memory_blocks(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The distinct storages behind the tensors as bytes, in the order in which they are first met."""
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in _storages(tensors).values()]  # type: ignore[call-overload]


def move_to_blocks(tensors: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """Let the tensors read `blocks`, which are as many bytes as those of `memory_blocks(tensors)`, block by block.

    Tensors that shared a storage share one again; views of them that are not among the tensors keep the old memory.
    """
    moved = dict(zip(_storages(tensors), blocks, strict=True))
    views = [_same_place(tensor, moved[tensor.untyped_storage().data_ptr()]) if tensor.numel() else tensor for tensor in tensors]
    for tensor, view in zip(tensors, views, strict=True):  # only now: freed memory could come back at a known address
        tensor.data = view


def _same_place(tensor: Tensor, block: Tensor) -> Tensor:
    """What lies in `block` where `tensor` lies in its storage."""
    values = block.view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + tensor.storage_offset())


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """By address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
