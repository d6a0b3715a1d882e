"""Weights in eight bits: every bit by a slow reference, the bound of the error, and what the blocks are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlhub.protocol.weights.pieces import (
    BLOCK,
    FP8,
    LARGEST,
    RELATIVE_ERROR,
    STEP_BELOW,
    dequantize,
    is_quantized,
    num_blocks,
    quantize,
    scales_name,
    whole_piece,
)

SHAPES = [(1, 1), (128, 128), (129, 127), (300, 200), (64, 384)]
ROUNDING = 2.0**-22  # of the division and the product in float32


def matrix(shape: tuple[int, int], spread: float = 4.0) -> Tensor:
    """Elements of many magnitudes, so that some are below the smallest normal number of their block."""
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))


def codes() -> list[tuple[float, int]]:
    """Every finite number of e4m3 with its byte, by the format's definition: sign, 4 bits of exponent with bias 7, 3 of
    mantissa."""
    found = []
    for byte in range(128):
        exponent, mantissa = byte >> 3, byte & 7
        if byte == 0x7F:  # NaN
            continue
        value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
        found.append((value, byte))
    return found


def nearest(value: float, numbers: list[tuple[float, int]]) -> int:
    """The byte of the nearest number; of two equally near the one with an even mantissa."""
    magnitude = min(numbers, key=lambda number: (abs(number[0] - abs(value)), number[1] & 1))
    return magnitude[1] | (0x80 if math.copysign(1, value) < 0 else 0)


def by_hand(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes and the scales, one element after the other."""
    rows, columns = weight.shape
    numbers = codes()
    stored = torch.zeros(rows, columns, dtype=torch.uint8)
    scales = torch.zeros(-(-rows // 128), -(-columns // 128))
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        places = list(itertools.product(range(128 * i, min(rows, 128 * i + 128)), range(128 * j, min(columns, 128 * j + 128))))
        largest = max(abs(float(weight[place])) for place in places)
        scale = torch.tensor(largest) / torch.tensor(448.0) if largest else torch.tensor(1.0)
        scales[i, j] = scale
        for place in places:
            stored[place] = nearest(float(weight[place] / scale), numbers)
    return stored, scales


@pytest.mark.parametrize("shape", [(1, 1), (130, 140), (40, 129)])
def test_every_bit_is_that_of_the_definition(shape: tuple[int, int]) -> None:
    weight = matrix(shape, spread=2.0)
    weight[0, 0] = 0.0
    stored, scales = quantize(weight)
    expected, expected_scales = by_hand(weight)
    assert torch.equal(stored.view(torch.uint8), expected) and torch.equal(scales, expected_scales)
    values = {byte: value for value, byte in codes()}
    sample = (int(expected[-1, -1]) & 0x7F, float(scales[-1, -1]))
    assert float(dequantize(stored, scales, torch.float32)[-1, -1].abs()) == pytest.approx(values[sample[0]] * sample[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_has_the_bound_of_three_bits_of_mantissa(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = matrix(shape).to(dtype)
    stored, scales = quantize(weight)
    assert (stored.dtype, stored.shape, scales.dtype) == (FP8, weight.shape, torch.float32)
    assert scales.shape == (num_blocks(shape[0]), num_blocks(shape[1]))
    error = (dequantize(stored, scales, torch.float32).double() - weight.double()).abs()
    steps = scales.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]].double()
    bound = torch.maximum(RELATIVE_ERROR * weight.double().abs(), STEP_BELOW * steps) * (1 + ROUNDING)
    assert bool((error <= bound).all())
    if shape != (1, 1):
        assert bool((error > 0.9 * bound).any()), "the bound is reached"
    largest = stored.float().abs().amax()
    assert float(largest) == LARGEST, "the whole range is used"


def test_a_block_has_its_own_scale() -> None:
    weight = torch.ones(256, 256)
    weight[128:, :128] = 1000.0
    weight[:128, 128:] = 0.0
    _, scales = quantize(weight)
    assert torch.equal(scales, torch.tensor([[1 / 448, 1.0], [1000 / 448, 1 / 448]]))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_extreme_blocks_stay_finite(value: float) -> None:
    weight = torch.full((2, 3), value)
    stored, scales = quantize(weight)
    back = dequantize(stored, scales, torch.float32)
    assert bool(back.isfinite().all()) and bool(((back - weight).abs() <= max(value / 16, 1e-40)).all())


def test_a_weight_that_is_not_finite_stays_visible() -> None:
    for value in (torch.nan, torch.inf):
        weight = torch.ones(4, 4)
        weight[1, 2] = value
        assert not bool(dequantize(*quantize(weight), torch.float32).isfinite().all())


def test_whole_blocks_may_be_quantized_apart_and_cut_ones_may_not() -> None:
    """Why receivers quantize whole matrices: a part that cuts a block would get other scales."""
    weight = matrix((256, 128))
    whole, parts = quantize(weight), [quantize(part) for part in weight.split(128)]
    assert torch.equal(whole[1], torch.cat([scales for _, scales in parts]))
    assert torch.equal(whole[0].view(torch.uint8), torch.cat([stored for stored, _ in parts]).view(torch.uint8))
    cut = torch.cat([quantize(part)[0] for part in weight.split(64)])
    assert not torch.equal(whole[0].view(torch.uint8), cut.view(torch.uint8))


def test_names_and_detection() -> None:
    stored, scales = quantize(torch.ones(2, 2))
    assert scales_name("a.weight") == "a.weight_scale_inv"
    pieces = [whole_piece("a.weight", stored), whole_piece("a.weight_scale_inv", scales)]
    assert is_quantized(pieces) and is_quantized(piece.info for piece in pieces) and not is_quantized(pieces[1:])
