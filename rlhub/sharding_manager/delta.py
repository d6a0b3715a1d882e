"""A byte-exact code for a block of weights that differs from an earlier one in few elements.

In bfloat16 most weights of a policy stay as they are over an update, and those that change do so by the smallest step.  So the
code has the positions that changed, as gaps of variable length (LEB128: seven bits a byte, least significant first), and the
differences of the elements' bits as integers, with small ones of either sign near 0 and the bytes of equal significance side by
side, which zstandard then compresses.  It knows nothing of numbers: NaN, infinities and -0.0 are bits like others.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rlhub.protocol.weights.fingerprint import WORD_TYPES

WORTHWHILE = 0.5
"""Largest size of a delta as a share of the block; above it the block is as good in full, and sooner read."""
HEADER = struct.Struct("<QQ")  # changed elements, bytes of their gaps
LOW_BITS, MORE = 0x7F, 0x80
BITS, GAP_BYTES = 7, 9
ZSTD = pa.Codec("zstd", compression_level=1)


class DeltaError(ValueError):
    """A delta cannot give its block: it is damaged, or that on which it builds is missing or another."""


def encode(base: Tensor, values: Tensor) -> Tensor | None:
    """Returns (bytes,) uint8, from which `decode` gets `values` with `base`, or None where a delta is not worthwhile.

    base, values: of one shape and dtype, on CPU.
    """
    before, after = _words(base), _words(values)
    positions = np.flatnonzero(before != after)
    if len(positions) * (1 + after.itemsize) > WORTHWHILE * values.nbytes:
        return None
    gaps = _pack_gaps(np.diff(positions, prepend=-1) - 1)
    steps = _zigzag(after[positions] - before[positions])
    planes = steps.view(np.uint8).reshape(len(steps), after.itemsize).T
    packed = ZSTD.compress(gaps.tobytes() + planes.tobytes(), asbytes=True)
    found = HEADER.pack(len(positions), len(gaps)) + packed
    if len(found) > WORTHWHILE * values.nbytes:
        return None
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def decode(base: Tensor, encoded: Tensor) -> Tensor:
    """Returns the values, with the shape and dtype of `base`, which stays as it is.  Raises DeltaError for bytes that no
    `encode` with such a base has returned; that the base is the right one must be known from its fingerprint."""
    data = encoded.numpy().tobytes()
    values = base.detach().clone(memory_format=torch.contiguous_format)
    words = _words(values)
    try:
        count, gap_bytes = HEADER.unpack_from(data)
        if count > words.size or gap_bytes > GAP_BYTES * count:
            raise DeltaError(f"it has {count} changes in {gap_bytes} bytes for {words.size} elements")
        size = gap_bytes + count * words.itemsize
        raw = np.frombuffer(ZSTD.decompress(data[HEADER.size :], size, asbytes=True), dtype=np.uint8)
        positions = np.cumsum(_unpack_gaps(raw[:gap_bytes], count) + 1) - 1
        steps = np.ascontiguousarray(raw[gap_bytes:].reshape(words.itemsize, count).T).view(words.dtype).reshape(-1)
        if count and not 0 <= positions[0] <= positions[-1] < words.size:
            raise DeltaError(f"it changes element {positions[-1]} of {words.size}")
        words[positions] += _unzigzag(steps)
    except (struct.error, OSError, ValueError, IndexError) as error:
        raise DeltaError(f"its bytes are no delta ({error})") from error
    return values


def _words(values: Tensor) -> np.ndarray:
    """Returns the bits of the elements as unsigned integers (elements,); of a contiguous tensor, its memory."""
    flat = values.detach().contiguous().reshape(-1)
    signed: np.ndarray = flat.view(WORD_TYPES[flat.element_size()]).numpy()
    return signed.view(f"u{flat.element_size()}")


def _zigzag(steps: np.ndarray) -> np.ndarray:
    """Maps 0, -1, 1, -2, ... (modulo the size of the word) to 0, 1, 2, 3, ..."""
    signed = steps.view(f"i{steps.itemsize}")
    codes: np.ndarray = (steps << steps.dtype.type(1)) ^ (signed >> signed.dtype.type(8 * steps.itemsize - 1)).view(steps.dtype)
    return codes


def _unzigzag(codes: np.ndarray) -> np.ndarray:
    one = codes.dtype.type(1)
    steps: np.ndarray = (codes >> one) ^ (~(codes & one) + one)
    return steps


def _pack_gaps(gaps: np.ndarray) -> np.ndarray:
    """Returns the gaps (changed,) int64, none negative, as bytes."""
    lengths = np.ones(len(gaps), dtype=np.int64)
    for number in range(1, GAP_BYTES):
        more = gaps >= 1 << BITS * number
        if not more.any():
            break
        lengths += more
    starts = np.cumsum(lengths) - lengths
    packed = np.empty(int(lengths.sum()), dtype=np.uint8)
    for number in range(int(lengths.max(initial=0))):
        longer = lengths > number
        last = lengths[longer] == number + 1
        packed[starts[longer] + number] = (gaps[longer] >> BITS * number & LOW_BITS) | np.where(last, 0, MORE)
    return packed


def _unpack_gaps(packed: np.ndarray, count: int) -> np.ndarray:
    """Returns the gaps; raises DeltaError unless there are `count`."""
    last = packed < MORE
    if int(last.sum()) != count or (count and not last[-1]):
        raise DeltaError(f"it has the positions of {int(last.sum())} changes instead of {count}")
    if not count:
        return np.zeros(0, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(last)[:-1] + 1])
    lengths = np.diff(starts, append=len(packed))
    if lengths.max() > GAP_BYTES:
        raise DeltaError("a gap is too long")
    place = np.arange(len(packed)) - np.repeat(starts, lengths)
    gaps: np.ndarray = np.add.reduceat((packed & LOW_BITS).astype(np.int64) << BITS * place, starts)
    return gaps
