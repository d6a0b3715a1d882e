"""The noise of sampling: the uniform of token `index` of a completion is a pure function of (seed, index).

A completion is therefore the same whatever batch it is generated in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlhub.utils.counter_noise import GOLDEN_GAMMA, random_bits, streams

FLOAT32_BITS = np.uint64(40)  # 64 - 24: what is left fits a float32 exactly, so the result stays below 1


def uniforms(seeds: NDArray[np.int64], firsts: NDArray[np.int64] | int, count: int) -> NDArray[np.float32]:
    """Uniforms in [0, 1) for tokens firsts .. firsts + count - 1 of each seed; (rows,) -> (rows, count) float32.

    firsts: (rows,), or one integer for all rows.
    """
    offsets = np.atleast_1d(np.asarray(firsts, dtype=np.int64)).view(np.uint64) * GOLDEN_GAMMA
    bits = random_bits(streams(seeds) + offsets, 0, count)  # position 0 of the moved stream is position `first` of the stream
    return ((bits >> FLOAT32_BITS).astype(np.float32)) * np.float32(2.0**-24)
