"""Numbers as tokens: the range of each number of an action is divided into equal bins, and each bin is a token (RT-2, Brohan et
al. 2023, arXiv 2307.15818; OpenVLA)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhub.config.sections.vla import VLAConfig
from rlhub.errors import DataError


class ActionTokenizer:
    """Maps actions to tokens and back: bin i of an axis is token first_bin_id + i, and stands for the bin's centre."""

    def __init__(self, vla: VLAConfig) -> None:
        self.bins, self.first, self.dim = vla.bins, vla.first_bin_id, vla.action_dim
        self.low, self.high = (np.broadcast_to(np.asarray(x, np.float64), self.dim) for x in (vla.action_low, vla.action_high))
        if not (self.low < self.high).all():
            raise DataError(f"model.vla.action_low={vla.action_low} is not below action_high={vla.action_high}")

    def encode(self, actions: ArrayLike) -> NDArray[np.int64]:
        """Returns token ids (..., action_dim) of actions (..., action_dim); numbers outside the range get its end's bin.  Raises
        DataError for numbers that are not finite, or another size."""
        wide = np.asarray(actions, np.float64)
        if wide.shape[-1:] != (self.dim,) or not np.isfinite(wide).all():
            raise DataError(f"actions of shape {wide.shape} are not finite numbers of {self.dim} axes (model.vla.action_dim)")
        share = (wide - self.low) / (self.high - self.low)
        return self.first + np.clip(np.floor(share * self.bins), 0, self.bins - 1).astype(np.int64)

    def decode(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Returns the actions (..., action_dim) of token ids of that shape, or of (..., chunk x action_dim) as (..., chunk,
        action_dim).  Raises DataError for a token that is no bin."""
        ids = np.asarray(tokens, np.int64)
        bins = ids.reshape(*ids.shape[:-1], -1, self.dim) if ids.shape[-1] != self.dim else ids
        if ids.size and (ids.min() < self.first or ids.max() >= self.first + self.bins):
            raise DataError(
                f"token ids {ids.min()} to {ids.max()}: action tokens are {self.first} to {self.first + self.bins - 1}"
            )
        share = (bins - self.first + 0.5) / self.bins
        return (self.low + share * (self.high - self.low)).astype(np.float32)
