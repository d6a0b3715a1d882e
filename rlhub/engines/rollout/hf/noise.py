"""The noise of sampling: the uniform of token `index` of a completion is a pure function of (seed, index).

A completion is therefore the same whatever batch it is generated in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlhub.utils.counter_noise import random_bits, streams

FLOAT32_BITS = np.uint64(40)  # 64 - 24: what is left fits a float32 exactly, so the result stays below 1


def uniforms(seeds: NDArray[np.int64], first: int, count: int) -> NDArray[np.float32]:
    """Uniforms in [0, 1) for tokens first .. first + count - 1 of each seed; (rows,) -> (rows, count) float32."""
    bits = random_bits(streams(seeds), first, count)
    return ((bits >> FLOAT32_BITS).astype(np.float32)) * np.float32(2.0**-24)
