"""Attention for cached decoding that does not repeat the key-value heads of grouped-query models.

While decoding, every query head of a group attends to the same keys with the same mask.  Taking the group's heads as if
they were query positions of one head gives the same result without copying keys and values once per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

GROUPED_ATTENTION = "rlhub_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query (rows, heads, time, width); key, value (rows, kv heads, keys, width); attention_mask additive
    (rows, 1, time, keys) or None (decoding only: all keys are visible).  Returns (rows, time, heads, width)."""
    rows, heads, time, width = query.shape
    kv_heads = key.shape[1]
    if time == 1:
        out = scaled_dot_product_attention(
            query.reshape(rows, kv_heads, heads // kv_heads, width), key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.reshape(rows, 1, heads, out.shape[-1]), None
    if heads != kv_heads:
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
