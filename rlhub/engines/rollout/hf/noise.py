"""Counter-based noise: the uniform of token `index` of a completion is a pure function of (seed, index).

A completion is therefore the same whatever batch it is generated in, and no generator state needs saving.  The mixing
function is SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2^64 / golden ratio, odd
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # SplitMix64's two multipliers
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
FLOAT32_BITS = np.uint64(40)  # 64 - 24: what is left fits a float32 exactly, so the result stays below 1


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * FIRST_FACTOR
    state = (state ^ (state >> np.uint64(27))) * SECOND_FACTOR
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: NDArray[np.int64], first: int, count: int) -> NDArray[np.float32]:
    """Uniforms in [0, 1) for tokens first .. first + count - 1 of each seed.

    seeds: (rows,).  Returns (rows, count) float32.  The seed is mixed before the index is added, so that neighbouring
    seeds do not give shifted copies of one sequence.
    """
    streams = _mix(seeds.astype(np.uint64) + GOLDEN_GAMMA)
    indices = np.arange(first + 1, first + count + 1, dtype=np.uint64) * GOLDEN_GAMMA
    bits = _mix(streams[:, None] + indices[None, :])
    return ((bits >> FLOAT32_BITS).astype(np.float32)) * np.float32(2.0**-24)
