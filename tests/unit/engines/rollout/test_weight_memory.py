"""Weights that move to other memory, with everything that reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlhub.engines.rollout.weight_memory import memory_blocks, move_to_blocks


def numbered(count: int) -> Tensor:
    return torch.arange(float(count))


@pytest.fixture
def tensors() -> list[Tensor]:
    """Two views of one storage, a transposed one, one of another dtype, the same parameter twice, an empty one."""
    fused = numbered(24).view(6, 4)
    tied = nn.Parameter(numbered(6).view(2, 3), requires_grad=False)
    return [fused, fused[2:5], numbered(8).view(2, 4).t(), numbered(5).to(torch.bfloat16), tied, tied, torch.empty(0, 3)]


def test_each_storage_is_one_block_in_the_order_of_the_tensors(tensors: list[Tensor]) -> None:
    blocks = memory_blocks(tensors)
    assert [len(block) for block in blocks] == [96, 32, 10, 24]
    assert all(block.dtype == torch.uint8 for block in blocks)
    assert blocks[0].data_ptr() == tensors[0].data_ptr()


def test_moved_tensors_keep_values_shapes_and_identity_and_read_the_new_memory(tensors: list[Tensor]) -> None:
    before = [(id(tensor), tensor.clone(), tensor.stride()) for tensor in tensors]
    segment = torch.zeros(4 * 4096, dtype=torch.uint8)
    blocks = [segment[4096 * i : 4096 * i + len(block)] for i, block in enumerate(memory_blocks(tensors))]
    for old, new in zip(memory_blocks(tensors), blocks, strict=True):
        new.copy_(old)
    move_to_blocks(tensors, blocks)
    for tensor, (identity, values, stride) in zip(tensors, before, strict=True):
        assert id(tensor) == identity and torch.equal(tensor, values) and tensor.stride() == stride
    assert len(memory_blocks(tensors)) == 1, "the segment is one storage"
    segment.zero_()
    assert all(not tensor.any() for tensor in tensors)
    tensors[1].fill_(7.0)
    assert tensors[0][2:5].eq(7.0).all() and tensors[0].sum() == 7 * 12, "views of one storage still are"


def test_the_number_of_blocks_must_fit(tensors: list[Tensor]) -> None:
    with pytest.raises(ValueError):
        move_to_blocks(tensors, memory_blocks(tensors)[:-1])
