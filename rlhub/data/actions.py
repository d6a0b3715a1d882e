"""The tokens of a vision-language-action policy: actions as bins, and prompts with the places of images.

The range of each number of an action is divided into equal bins, and each bin is a token (RT-2, Brohan et al. 2023, arXiv
2307.15818; OpenVLA, Kim et al. 2024, arXiv 2406.09246).  Recorded episodes and environments use the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhub.config.sections.vla import VLAConfig
from rlhub.data.tokenizing import Tokenizer, encode
from rlhub.errors import DataError


class ActionTokenizer:
    """Maps actions to tokens and back: bin i of an axis is token first_bin_id + i, and stands for the bin's centre."""

    def __init__(self, vla: VLAConfig) -> None:
        self.bins, self.first, self.dim = vla.bins, vla.first_bin_id, vla.action_dim
        self.low, self.high = (np.broadcast_to(np.asarray(x, np.float64), self.dim) for x in (vla.action_low, vla.action_high))
        if not (self.low < self.high).all():
            raise DataError(f"model.vla.action_low={vla.action_low} is not below action_high={vla.action_high}")

    def encode(self, actions: ArrayLike) -> NDArray[np.int64]:
        """Returns token ids (..., action_dim) of actions (..., action_dim); numbers outside the range get its end's bin.

        Raises DataError for numbers that are not finite, or another number of axes.
        """
        wide = np.asarray(actions, np.float64)
        if wide.shape[-1:] != (self.dim,) or not np.isfinite(wide).all():
            raise DataError(f"actions of shape {wide.shape} are not finite numbers of {self.dim} axes (model.vla.action_dim)")
        share = (wide - self.low) / (self.high - self.low)
        return self.first + np.clip(np.floor(share * self.bins), 0, self.bins - 1).astype(np.int64)

    def decode(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Returns the actions (..., chunk, action_dim) of responses (..., chunk x action_dim).  Raises DataError for a token that
        is no bin, and for a response that is no whole number of actions."""
        ids = np.asarray(tokens, np.int64)
        last = self.first + self.bins - 1
        if ids.size and (ids.min() < self.first or ids.max() > last):
            raise DataError(f"token ids {ids.min()} to {ids.max()}: action tokens are {self.first} to {last}")
        if ids.shape[-1] % self.dim:
            raise DataError(f"{ids.shape[-1]} tokens are no whole number of actions of {self.dim} axes (model.vla.action_dim)")
        bins = ids.reshape(*ids.shape[:-1], -1, self.dim) - self.first
        actions: NDArray[np.float32] = (self.low + (bins + 0.5) / self.bins * (self.high - self.low)).astype(np.float32)
        return actions


def prompts_with_images(tokenizer: Tokenizer, instructions: Sequence[str], num_images: int, vla: VLAConfig) -> list[list[int]]:
    """Returns the token ids of prompts: the instruction, and then vla.tokens_per_image image tokens for each of its images.

    Raises DataError for an instruction whose text has an image token.
    """
    places = [vla.image_token_id] * (vla.tokens_per_image * num_images)
    known: dict[str, list[int]] = dict.fromkeys(instructions, [])
    for text, ids in zip(known, encode(tokenizer, list(known), add_special_tokens=False), strict=True):
        if vla.image_token_id in ids:
            raise DataError(f"the instruction {text!r} has the image token {vla.image_token_id}, which stands for pictures only")
        known[text] = [*ids, *places]
    return [known[text] for text in instructions]
