"""Counter-based noise: uniforms that are a pure function of a few integers (seed, step, sample, position), so that they do not
depend on who draws them, in what order or in which batch, and no generator state needs saving.

The mixing function is SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2^64 / golden ratio, odd
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # SplitMix64's two multipliers
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
FLOAT64_BITS = np.uint64(11)  # 64 - 53: what is left fits a float64 exactly, so the result stays below 1


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * FIRST_FACTOR
    state = (state ^ (state >> np.uint64(27))) * SECOND_FACTOR
    return state ^ (state >> np.uint64(31))


def streams(*counters: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """(rows,) stream numbers from one or more counters, each an integer or (rows,) integers, mixed in one after another."""
    state = np.zeros(1, dtype=np.uint64)
    for counter in counters:
        state = _mix((state ^ np.atleast_1d(np.asarray(counter, dtype=np.int64)).view(np.uint64)) + GOLDEN_GAMMA)
    return state


def random_bits(stream: NDArray[np.uint64], first: int, count: int) -> NDArray[np.uint64]:
    """64 random bits for positions first .. first + count - 1 of each stream; (rows,) -> (rows, count).

    Streams are mixed numbers, so neighbouring counters do not give shifted copies of one sequence.
    """
    positions = np.arange(first + 1, first + count + 1, dtype=np.uint64) * GOLDEN_GAMMA
    return _mix(stream[:, None] + positions[None, :])


def uniforms(stream: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """Uniforms in [0, 1) for the first `count` positions of each stream; (rows,) -> (rows, count) float64."""
    return (random_bits(stream, 0, count) >> FLOAT64_BITS).astype(np.float64) * 2.0**-53
