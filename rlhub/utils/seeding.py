"""Seeds that depend on what is sampled, never on where or in which batch it is sampled.

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) mixes the three numbers.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(state: int) -> int:
    state = (state + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def sample_seed(run_seed: int, ordinal: int, sample: int) -> int:
    """Seed in [0, 2**31) of sample number `sample` of prompt number `ordinal` of the run with seed `run_seed`."""
    return _mix(_mix(_mix(run_seed & _MASK) ^ (ordinal & _MASK)) ^ (sample & _MASK)) >> 33


def sample_seeds(run_seed: int, ordinals: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """`sample_seed` of every row: `ordinals` and `samples` (rows,) integers -> (rows,) int64."""
    pairs = zip(ordinals.tolist(), samples.tolist(), strict=True)
    return np.array([sample_seed(run_seed, ordinal, sample) for ordinal, sample in pairs], dtype=np.int64)


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Order (size,) int64 of a data set's rows in one epoch; a function of its arguments only."""
    return np.random.Generator(np.random.Philox(key=_mix(_mix(seed & _MASK) ^ epoch))).permutation(size)
