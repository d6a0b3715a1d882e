"""One decoding step of any causal Hugging Face model, by its own forward."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class ModelStep:
    """Feeds one token a row, appends it to the cache and returns logits (rows, vocabulary)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
        """tokens, positions (rows,) int64; mask additive (rows, 1, 1, keys with the new one), None if every key is visible."""
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
