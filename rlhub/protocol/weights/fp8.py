"""Weights in eight bits: float8_e4m3fn with one float32 scale for each block of 128 x 128 elements.

A rollout engine may store the matrices of its linear layers so, as DeepSeek-V3's checkpoints do (arXiv 2412.19437, section 3.3):
a weight `x.weight` (out, in) is a matrix of that name in float8_e4m3fn and its scales, `x.weight_scale_inv` (out / 128, in / 128,
rounded up), by which a block's elements are multiplied.  The scale of a block is its largest magnitude / 448, so every block uses
the whole range.

Blocks are counted from the matrix's first element, and a trainer's pieces may cut them, so a whole matrix is quantized at once,
where it has arrived (see sharding_manager.manager).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlhub.protocol.weights.pieces import Piece, PieceInfo

BLOCK = 128
"""Rows and columns of a block."""
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
RELATIVE_ERROR = 2.0**-4
"""The largest error of an element by its own magnitude: half of the step of 3 bits of mantissa."""
STEP_BELOW = 2.0**-10
"""The largest error of an element in units of its block's scale, where it is smaller than 2^-6 of these: half of the smallest
step, 2^-9."""


def scales_name(name: str) -> str:
    """Returns the name of a quantized weight's scales."""
    return f"{name}_scale_inv"


def is_quantized(weights: Iterable[Piece | PieceInfo]) -> bool:
    """Returns whether some of the weights are stored in eight bits."""
    return any((weight.tensor.dtype if isinstance(weight, Piece) else weight.dtype) == FP8 for weight in weights)


def num_blocks(size: int) -> int:
    """Returns the number of blocks along a dimension with so many elements."""
    return -(-size // BLOCK)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a matrix (out, in) in eight bits, rounded to nearest, and its scales (blocks of out, blocks of in) in float32.

    For an element x of a block with scale s the stored number differs from x by at most max(2^-4 |x|, 2^-10 s), but for the
    rounding of float32.  A block of zeros has the scale 1.  An element that is not finite spoils its block, and stays visible.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(num_blocks(rows), BLOCK, num_blocks(columns), BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    numbers = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(FP8)
    return numbers.view(padded.shape)[:rows, :columns].contiguous(), scales


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrix that `quantize` has stored, computed in float32 and cast to `dtype`."""
    rows, columns = weight.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() * spread).to(dtype)
