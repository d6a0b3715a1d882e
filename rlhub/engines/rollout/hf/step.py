"""One decoding step as the sampling loop sees it, and its form for any causal Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class DecodeStep(Protocol):
    """Feeds one token a row, appends it to the cache and returns logits (rows, vocabulary).

    fused: tensors other than the model's own parameters through which it reads the same memory.
    """

    fused: Sequence[Tensor]

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
        """tokens, positions (rows,) int64; mask additive (rows, 1, 1, keys with the new one), None if every key is visible."""


class ModelStep:
    """The step by the model's own forward."""

    fused: Sequence[Tensor] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
        out = self._model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits
        return logits[:, -1]
