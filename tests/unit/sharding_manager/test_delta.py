"""The delta code: byte-exact for all bits of all dtypes, small for few changes, and strict with bytes that are no delta."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhub.protocol.weights.fingerprint import WORD_TYPES
from rlhub.sharding_manager.delta import DeltaError, decode, encode

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


def bits(values: Tensor) -> Tensor:
    return values.reshape(-1).view(WORD_TYPES[values.element_size()])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all: NaN of every payload, infinities, subnormal numbers and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def changed(base: Tensor, share: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(base.shape, generator=generator) < share
    return torch.where(chosen, random_bits(tuple(base.shape), base.dtype, seed + 1), base)


def ulps(base: Tensor, share: float, seed: int) -> Tensor:
    """A step of the optimizer in bfloat16: few elements change, by the last bit."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(base.shape, generator=generator) < share
    up = torch.randint(0, 2, base.shape, generator=generator, dtype=torch.int16) * 2 - 1
    return (base.view(torch.int16) + torch.where(chosen, up, 0)).view(torch.bfloat16)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (40, 33), (5, 6, 7), (20_000,)]),
    share=st.sampled_from([0.0, 1e-4, 0.02, 0.2, 1.0]),
    seed=st.integers(0, 1 << 30),
)
def test_a_block_comes_back_bit_by_bit_or_in_full(dtype: torch.dtype, shape: tuple[int, ...], share: float, seed: int) -> None:
    base = random_bits(shape, dtype, seed)
    values = changed(base, share, seed)
    before = bits(base).clone()
    encoded = encode(base, values)
    if encoded is None:
        return
    assert encoded.nbytes <= values.nbytes / 2
    found = decode(base, encoded)
    assert found.dtype == dtype and found.shape == values.shape
    assert torch.equal(bits(found), bits(values)) and torch.equal(bits(base), before)


def test_bits_that_compare_as_equal_are_changes_and_nan_that_stays_is_none() -> None:
    base = torch.zeros(4096, dtype=torch.bfloat16)
    base[7] = float("nan")
    values = base.clone()
    values[3], values[4095] = -0.0, float("inf")
    encoded = encode(base, values)
    assert encoded is not None and encoded.nbytes < 100
    assert torch.equal(bits(decode(base, encoded)), bits(values))


def test_all_changed_goes_in_full_and_equal_blocks_take_a_few_bytes() -> None:
    base = random_bits((1 << 16,), torch.bfloat16, 0)
    assert encode(base, (base.view(torch.int16) + 1).view(torch.bfloat16)) is None
    same = encode(base, base.clone())
    assert same is not None and same.nbytes < 40 and torch.equal(bits(decode(base, same)), bits(base))


@pytest.mark.parametrize("change", [changed, ulps])
def test_a_fiftieth_of_the_values_takes_less_than_a_twelfth_of_the_bytes(change) -> None:  # type: ignore[no-untyped-def]
    """Values of any bits, and steps of the last bit as optimizers make them."""
    base = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    values = change(base, 0.02, 2)
    encoded = encode(base, values)
    assert encoded is not None
    share = encoded.nbytes / values.nbytes
    assert share <= (0.035 if change is changed else 0.015), share
    assert torch.equal(bits(decode(base, encoded)), bits(values))


def test_a_strided_base_is_read_by_its_elements() -> None:
    base = torch.randn(64, 128).bfloat16().T
    values = ulps(base.contiguous(), 0.02, 5)
    encoded = encode(base, values)
    assert encoded is not None and torch.equal(decode(base, encoded), values)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 10_000))
def test_damaged_bytes_raise_one_error_or_give_other_bits(place: int, flip: int, cut: int) -> None:
    """The fingerprint of the block finds the second case; nothing else may happen."""
    base = torch.randn(4096, generator=torch.Generator().manual_seed(3)).bfloat16()
    encoded = encode(base, ulps(base, 0.05, 4))
    assert encoded is not None
    flipped = encoded.clone()
    flipped[place % len(flipped)] ^= flip
    for damaged in (flipped, encoded[: cut % len(encoded)]):
        try:
            found = decode(base, damaged)
        except DeltaError:
            continue
        assert found.shape == base.shape
