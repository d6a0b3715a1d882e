"""Matrix products in float32 on CPUs, by the faster of the two libraries that torch brings.

torch multiplies float32 matrices on x86 with MKL, which on processors other than Intel's leaves AVX-512 unused; oneDNN does not,
and takes half the time (`scripts/bench/products.py`).  Which one computes a product depends only on the processor and on the
product's sizes, so results repeat.

oneDNN compiles code for every size that it meets and keeps it, amid the memory that the step around it frees: batches of ever
other lengths would leave gigabytes in pieces that are too small for the next step.  So of the sizes that differ from batch to
batch it meets only a few, eight from each power of two to the next; rows of zeros fill up to them.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_MULTIPLICATIONS = 1 << 21
"""Smaller products take less time than oneDNN needs to begin."""
MIN_ROWS = 8
"""Of either factor; oneDNN takes longer for the few rows of a short batch than it saves."""
MAX_ROWS_AS_THEY_ARE = 64
"""Up to here a number of rows is not rounded up: a copy would take longer.  A server meets all numbers up to its longest batch of
prompts, and what oneDNN compiles for each of them stays in memory."""
CPU_INFO = Path("/proc/cpuinfo")


@cache
def onednn_is_faster() -> bool:
    """On this processor, for large products."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and CPU_INFO.exists()
        and "GenuineIntel" not in CPU_INFO.read_text()
    )


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: inputs (..., in), weight (out, in), bias (out,) -> (..., out)."""
    if not _suits(inputs, weight, weight.shape[0]):
        return nn.functional.linear(inputs, weight, bias)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (inputs, weight, bias)):
        product: Tensor = _Linear.apply(inputs, weight, bias)
        return product
    return _rows_onednn(inputs, weight, bias)


def matmul(one: Tensor, other: Tensor) -> Tensor:
    """(rows, inner) @ (inner, columns), without gradient; for sizes that seldom change."""
    return _onednn(one, other.t(), None) if _suits(one, other, other.shape[1]) else torch.mm(one, other)


def weight_gradient(grads: Tensor, inputs: Tensor) -> Tensor:
    """Of a linear layer, without gradient of its own: dW = dy^T x; grads (rows, out), inputs (rows, in) -> (out, in)."""
    if not _suits(grads.t(), inputs, inputs.shape[1]):
        return torch.mm(grads.t(), inputs)
    return _onednn(_filled_up(grads).t(), _filled_up(inputs).t(), None)


def use_fast_products(model: nn.Module) -> None:
    """Let every plain linear layer of the model multiply by `linear`, where that makes a difference."""
    if onednn_is_faster():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FastLinear


class FastLinear(nn.Linear):
    """A linear layer that `use_fast_products` has changed."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W;  dW = dy^T x;  db = sum of dy over rows.  Kept of x and W is what these need."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_inputs, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if wants_weight else None, weight if wants_inputs else None)
        return _rows_onednn(inputs, weight, bias)

    @staticmethod
    @once_differentiable  # products by oneDNN have no gradient of their own
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        *sizes, outputs = grads[0].shape
        rows = grads[0].reshape(-1, outputs)
        d_inputs = None if weight is None else linear(rows, weight.t()).view(*sizes, weight.shape[1])
        d_weight = None if inputs is None else weight_gradient(rows, inputs.reshape(-1, inputs.shape[-1]))
        return d_inputs, d_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _suits(inputs: Tensor, weight: Tensor, outputs: int) -> bool:
    return (
        inputs.dtype == weight.dtype == torch.float32
        and inputs.numel() * outputs >= MIN_MULTIPLICATIONS
        and min(inputs.numel() // inputs.shape[-1], outputs) >= MIN_ROWS
        and inputs.device.type == "cpu"
        and onednn_is_faster()
        and type(weight).__torch_dispatch__ is Tensor.__torch_dispatch__  # no DTensor
        and not torch.is_autocast_enabled("cpu")
    )


def _rows_onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    *sizes, width = inputs.shape
    num_rows = math.prod(sizes)
    if num_rows == _rounded_up(num_rows):
        return _onednn(inputs, weight, bias)
    return _onednn(_filled_up(inputs.reshape(num_rows, width)), weight, bias)[:num_rows].view(*sizes, weight.shape[0])


def _filled_up(rows: Tensor) -> Tensor:
    """(rows, width), with rows of zeros after them where there is another number of rows to be computed."""
    num_rows, width = rows.shape
    if num_rows == _rounded_up(num_rows):
        return rows
    filled = rows.new_empty(_rounded_up(num_rows), width)
    filled[:num_rows] = rows
    filled[num_rows:] = 0
    return filled


def _rounded_up(num_rows: int) -> int:
    """The next number of four significant bits: at most an eighth more."""
    if num_rows <= MAX_ROWS_AS_THEY_ARE:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return -(-num_rows // step) * step


def _onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Inputs are copied by the operator itself where they have gaps."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()  # oneDNN takes hundreds of times as long to copy a weight whose rows have gaps
    if bias is not None:
        bias = bias.contiguous()  # the operator ignores its stride
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return product
