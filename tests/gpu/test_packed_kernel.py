"""The variable-length CUDA kernel keeps packed rows apart, as the CPU's grouped attention does."""

from __future__ import annotations

import pytest
import torch

from rlhub.models.packed_attention import packed_attention, plan_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LENGTHS = [130, 1, 64, 7, 1, 300]
WIDTH = 64


def inputs(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), WIDTH) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes]


def attend(tensors: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    plan = plan_attention(lengths, torch.device("cuda"))
    return packed_attention(torch.nn.Module(), *tensors, None, scaling=WIDTH**-0.5, packing=plan)[0]


def row_by_row(tensors: list[torch.Tensor]) -> torch.Tensor:
    pieces = [tensor.split(LENGTHS, dim=2) for tensor in tensors]
    return torch.cat([attend(list(row), [length]) for *row, length in zip(*pieces, LENGTHS, strict=True)], dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_rows_are_rows_alone_in_float32(kv_heads: int, dtype: torch.dtype) -> None:
    half = inputs(kv_heads, dtype)
    whole = [tensor.detach().float().requires_grad_() for tensor in half]  # float32 takes the grouped kernel
    found, expected = attend(half, LENGTHS), row_by_row(whole)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to("cuda")
    gradients = torch.autograd.grad((found.float() * factor).sum(), half)
    for ours, theirs in zip(gradients, torch.autograd.grad((expected * factor).sum(), whole), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_garbage_in_other_rows_changes_nothing(kv_heads: int) -> None:
    tensors = [tensor.detach() for tensor in inputs(kv_heads, torch.bfloat16)]
    before = attend(tensors, LENGTHS)
    first, end = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[:, :, :first] += 3
        tensor[:, :, end:] -= 3
    after = attend(changed, LENGTHS)
    assert torch.equal(before[:, first:end], after[:, first:end])
    assert not torch.equal(before[:, :first], after[:, :first])
    joined = attend(changed, [sum(LENGTHS)])  # the control: one long row lets it through
    assert (joined[:, first:end] - attend(tensors, [sum(LENGTHS)])[:, first:end]).abs().max() > 1e-2


@pytest.mark.parametrize("window", [1, 16, 500])
def test_a_sliding_window_is_that_of_float32(window: int) -> None:
    half = [tensor.detach() for tensor in inputs(2, torch.bfloat16)]
    plan = plan_attention(LENGTHS, torch.device("cuda"))
    options = {"scaling": WIDTH**-0.5, "packing": plan, "sliding_window": window}
    found = packed_attention(torch.nn.Module(), *half, None, **options)[0]
    whole = [tensor.float() for tensor in half]  # float32 takes the grouped kernel and a mask
    torch.testing.assert_close(
        found.float(), packed_attention(torch.nn.Module(), *whole, None, **options)[0], rtol=2e-2, atol=2e-2
    )
