"""Reading prompts: forwards over left-padded batches of them, and the masks that hide the padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rlhub.engines.rollout.hf.cache import minus_infinity, new_prompt_cache


def prefill_chunks(lengths: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """Ranges of the ascending `lengths` whose padded size is at most `max_tokens` (at least one prompt each)."""
    chunks, first = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or (i + 1 - first) * lengths[i] > max_tokens:
            chunks.append((first, i))
            first = i
    return chunks


def read_prompts(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Cache]:
    """Forward over left-padded prompts; returns logits of the last position (prompts, vocabulary) and the filled cache."""
    width = len(prompts[-1])
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    columns = torch.arange(width)
    visible = (columns[None, :] <= columns[:, None])[None] & (columns[None, None, :] >= pads[:, None, None])
    mask = torch.zeros(visible.shape, dtype=model.dtype).masked_fill_(~visible, minus_infinity(model.dtype))
    cache = new_prompt_cache(len(model.get_decoder().layers))
    out = model(
        input_ids=ids.to(model.device),
        attention_mask=mask[:, None].to(model.device),
        position_ids=(columns[None, :] - pads[:, None]).clamp(min=0).to(model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits[:, -1], cache


def key_mask(pads: Tensor, columns: int, dtype: torch.dtype) -> Tensor | None:
    """(rows, 1, 1, columns) additive mask that hides each row's padding; None when there is none."""
    if int(pads.max()) == 0:
        return None
    hidden = torch.arange(columns, device=pads.device)[None, :] < pads[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=pads.device).masked_fill_(hidden, minus_infinity(dtype))
    return mask[:, None, None]
