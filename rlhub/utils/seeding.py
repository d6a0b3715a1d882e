"""Seeds and noise that depend on what is sampled, never on where, in which order or in which batch it is sampled.

All of them are words of one counter-based generator: Philox4x64-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy
as 1, 2, 3, SC 2011), in numpy's implementation.  A word is a pure function of a few integers, so no generator's state has to be
saved.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_BLOCK = 4  # words that Philox gives for each value of its counter
_SEED_BITS = 31
_DOUBLE_BITS = np.uint64(11)  # 64 - 53: what is left fits a float64 exactly, so a uniform stays below 1


class Purpose(IntEnum):
    """The purpose of drawn words.  Words of different purposes are independent, whatever the seed."""

    SAMPLE = 0
    """The seed of a sample; its number is the prompt's ordinal."""
    ORDER = 1
    """The order of a data set's rows; its number is the epoch."""
    TOKEN = 2
    """The noise with which a completion's tokens are sampled."""
    CONTINUATION = 3
    """The seed of a completion that continues in an engine whose noise has no position; its number is that of the tokens so
    far."""
    SELECTION = 4
    """The keys by which a loss selects tokens; its numbers are step and sample."""
    CURRICULUM = 5
    """The order of rows that were drawn equally often; its number is that of the batch."""


def sample_seed(run_seed: int, ordinal: int, sample: int) -> int:
    """Returns the seed in [0, 2**31) of sample number `sample` of prompt number `ordinal` of the run with seed `run_seed`."""
    return int(random_bits(run_seed, Purpose.SAMPLE, ordinal, first=sample)[0]) >> (64 - _SEED_BITS)


def sample_seeds(run_seed: int, ordinal: int, num_samples: int) -> list[int]:
    """Returns the `sample_seed` of the first `num_samples` samples of a prompt."""
    words = random_bits(run_seed, Purpose.SAMPLE, ordinal, count=num_samples)
    return [word >> (64 - _SEED_BITS) for word in words.tolist()]


def permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Returns the order (size,) int64 of a data set's rows in one epoch; a pure function of its arguments."""
    return np.random.Generator(_philox(seed, Purpose.ORDER, (epoch,), 0)).permutation(size)


def uniforms(seed: int, purpose: Purpose, *numbers: int, count: int) -> NDArray[np.float64]:
    """Returns the first `count` words of the sequence as uniforms in [0, 1); (count,) float64."""
    return (random_bits(seed, purpose, *numbers, count=count) >> _DOUBLE_BITS).astype(np.float64) * 2.0**-53


def random_bits(seed: int, purpose: Purpose, *numbers: int, first: int = 0, count: int = 1) -> NDArray[np.uint64]:
    """Returns the words first .. first + count - 1 (64 random bits each) of the sequence of a seed, a purpose and up to three
    numbers; (count,)."""
    block, skipped = divmod(first & _MASK, _BLOCK)
    words: NDArray[np.uint64] = _philox(seed, purpose, numbers, block).random_raw(skipped + count)[skipped:]
    return words


def _philox(seed: int, purpose: Purpose, numbers: tuple[int, ...], block: int) -> np.random.Philox:
    """Returns Philox with the key (seed, purpose) and a counter of the block and up to three numbers."""
    counter = np.array([block, *(number & _MASK for number in numbers), 0, 0, 0][:_BLOCK], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed & _MASK, purpose], dtype=np.uint64), counter=counter)
