"""Causal attention over packed rows, registered with transformers as `rlhub_packed`.

Rows of similar length are gathered into a few right-padded batches and go through the ordinary causal kernel: a real query
never attends to the padding on its right, so the result is exact without any mask but that of a sliding window.  The plan is made
once per micro-batch, and all layers use it.  On CUDA with half precision the variable-length kernel, FlashAttention 2 or where
it is installed 3, needs no padding at all.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlhub.errors import EngineError
from rlhub.models.device_copies import to_device

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "rlhub_packed"
TRANSFORMED_SCORES = ("softcap", "s_aux")
"""Arguments of attention functions that change the scores (Gemma 2, gpt-oss), which no kernel for packed rows follows."""
FA3_PACKAGE, HOPPER = "flash_attn_interface", 9
"""FlashAttention 3, and the GPUs (by compute capability) that it is for."""
NEW_GROUP_RATIO = 0.75  # a row shorter than this share of its group's longest opens a new group ...
MIN_GROUP_TOKENS = 1024  # ... once the group is worth a kernel call of its own


def takes_grouped(kernel: Callable[..., Any]) -> bool:
    """Returns whether the variable-length kernel has an argument for fewer key-value heads than queries; that of torch 2.11 takes
    them without."""
    return "enable_gqa" in inspect.signature(kernel).parameters


TAKES_GROUPED = takes_grouped(varlen_attn)


@dataclass(slots=True, kw_only=True)
class AttentionPlan:
    """The places of rows in the packed axis of N tokens, and in groups of M >= N places in all.

    A plan of one group without padding, in packed order, has no indices, because the tokens are in place already.

    shapes: (rows, longest) of each group, in the order of the groups.
    gather: (M,) the token at each place; at padding it is some token of the same row.
    restore: (N,) the place of each token.
    padding: (P,) the places that are padding.
    boundaries: (rows + 1,) int32, the first token of each row, and the end.
    longest: the length of the longest row.
    """

    shapes: list[tuple[int, int]]
    gather: Tensor | None
    restore: Tensor | None
    padding: Tensor | None
    boundaries: Tensor
    longest: int
    num_tokens: int


def group_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Returns the row indices of each group, longest rows first."""
    groups: list[list[int]] = []
    longest = tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not groups or (lengths[row] < NEW_GROUP_RATIO * longest and tokens >= MIN_GROUP_TOKENS):
            groups.append([])
            longest, tokens = lengths[row], 0
        groups[-1].append(row)
        tokens += longest
    return groups


def plan_attention(lengths: Sequence[int], device: torch.device) -> AttentionPlan:
    """Returns the plan for rows of these lengths (all > 0), packed one after the other."""
    starts = [0, *accumulate(lengths)]
    boundaries = torch.tensor(starts, dtype=torch.int32)
    longest = max(lengths)
    if min(lengths) == longest:
        return AttentionPlan(
            shapes=[(len(lengths), longest)],
            gather=None,
            restore=None,
            padding=None,
            boundaries=to_device(boundaries, device),
            longest=longest,
            num_tokens=starts[-1],
        )
    shapes, gathers, reals = [], [], []
    start_of, length_of = torch.tensor(starts[:-1]), torch.tensor(lengths)
    for rows in group_lengths(lengths):
        own, width = torch.tensor(rows), lengths[rows[0]]
        columns = torch.arange(width)[None]
        last = length_of[own, None] - 1
        gathers.append((start_of[own, None] + torch.minimum(columns, last)).flatten())
        reals.append((columns <= last).flatten())
        shapes.append((len(rows), width))
    gather, real = torch.cat(gathers), torch.cat(reals)
    places = real.nonzero().squeeze(1)
    restore = torch.empty(starts[-1], dtype=torch.int64)
    restore[gather[places]] = places
    padding = (~real).nonzero().squeeze(1)
    return AttentionPlan(
        shapes=shapes,
        gather=to_device(gather, device),
        restore=to_device(restore, device),
        padding=to_device(padding, device),
        boundaries=to_device(boundaries, device),
        longest=longest,
        num_tokens=starts[-1],
    )


class _ToGroups(torch.autograd.Function):
    """Maps tokens (N, ...) to places (M, ...).

    Padding gets no gradient from causal attention, so the backward pass is a gather too, which is several times faster on CPU
    than the scatter-add of autograd.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gather: Tensor, restore: Tensor) -> Tensor:
        ctx.save_for_backward(restore)
        return tokens.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (restore,) = ctx.saved_tensors
        return grads[0].index_select(0, restore), None, None


class _FromGroups(torch.autograd.Function):
    """Maps places (M, ...) to tokens (N, ...); the padding's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, plan_gather: Tensor, restore: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(plan_gather, padding)
        return places.index_select(0, restore)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        gather, padding = ctx.saved_tensors
        return grads[0].index_select(0, gather).index_fill_(0, padding, 0.0), None, None, None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: AttentionPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the signature of transformers' attention functions; returns (1, tokens, heads, width).

    query: (1, heads, tokens, width).
    key, value: (1, kv heads, tokens, width).
    packing: the plan of the rows.
    sliding_window: the number of tokens that a token attends to, itself included; None for all before it.
    Raises EngineError where the model does not pass the plan, or its attention changes the scores.
    """
    if packing is None or packing.num_tokens != query.shape[2]:
        raise EngineError(
            f"packed attention was given no plan for its {query.shape[2]} tokens: this model does not pass attention arguments "
            "through; set model.use_remove_padding=False"
        )
    refuse_arguments(others, TRANSFORMED_SCORES, "packed attention", "model.use_remove_padding=False")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    window = None if sliding_window is None or sliding_window >= packing.longest else sliding_window
    return attend_packed(query, key, value, packing, scaling=scaling, dropout=dropout, window=window)[None], None


def refuse_arguments(given: Mapping[str, Any], names: Sequence[str], kernel: str, remedy: str) -> None:
    """Raises EngineError where a model gives its attention function an argument that the kernel does not follow."""
    if asked := [name for name in names if isinstance(given.get(name), Tensor) or given.get(name)]:
        raise EngineError(f"the model's attention asks for {', '.join(asked)}, which {kernel} does not compute; set {remedy}")


def has_kernel(query: Tensor) -> bool:
    """Returns whether the kernel for unpadded rows computes these queries."""
    return query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)


def use_flash_attention_3(device: torch.device) -> bool:
    """Switches the kernel for unpadded rows to FlashAttention 3 for the whole process; returns whether it is.

    It needs a Hopper GPU, the package flash_attn_interface, and a torch that can switch (2.11 or later).
    """
    switch = vars(torch.nn.attention).get("activate_flash_attention_impl")
    if device.type != "cuda" or switch is None or importlib.util.find_spec(FA3_PACKAGE) is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    try:
        switch("FA3")
    except (ImportError, RuntimeError) as error:
        logger.warning("%s is installed and cannot be used (%s): attention runs on FlashAttention 2", FA3_PACKAGE, error)
        return False
    return True


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Computes causal attention of each row over itself; returns (tokens, heads, width).

    query: (tokens, heads, width).
    key, value: (tokens, kv heads, width).
    scaling: the factor of the scores; None is 1 / sqrt(width).
    window: the number of tokens that a token attends to, itself included; None for all before it.
    """
    if has_kernel(query) and dropout == 0.0:
        return _variable_length(query, key, value, plan, scaling, window)
    tokens = [query, key, value]
    if plan.gather is not None and plan.restore is not None:
        tokens = [_ToGroups.apply(tensor, plan.gather, plan.restore) for tensor in tokens]  # type: ignore[no-untyped-call]
    out = _attend(tokens, plan.shapes, scaling, dropout, window)
    if plan.gather is not None:
        out = _FromGroups.apply(out, plan.gather, plan.restore, plan.padding)  # type: ignore[no-untyped-call]
    return out


def _attend(
    tokens: list[Tensor], shapes: list[tuple[int, int]], scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Computes each group by the causal kernel, or with a window by a mask, with (M, heads, width) tensors in and out."""
    grouped = tokens[0].shape[1] != tokens[1].shape[1]
    outs, first = [], 0
    for rows, longest in shapes:
        size = rows * longest
        q, k, v = (torch.unflatten(tensor[first : first + size], 0, (rows, longest)).transpose(1, 2) for tensor in tokens)
        mask = None if window is None else _band(longest, window, q.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=grouped
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
        first += size
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _band(longest: int, window: int, device: torch.device) -> Tensor:
    """Returns the mask (longest, longest) of a causal window: True where the row's token attends to the column's."""
    return torch.ones(longest, longest, dtype=torch.bool, device=device).tril().triu(1 - window)


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scaling: float | None, window: int | None = None
) -> Tensor:
    bounds, longest = (plan.boundaries, plan.boundaries), (plan.longest, plan.longest)
    return variable_length(query, key, value, bounds, longest, scaling=scaling, window=window)


def variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Computes causal attention of rows by CUDA's kernel for unpadded rows; returns the queries' (tokens, heads, width).

    bounds: (rows + 1,) int32 of the rows' queries and of their keys: the last query of a row attends up to its last key.
    longest: the most queries and the most keys of a row.
    """
    q, k, v = (tensor.contiguous() for tensor in (query, key, value))
    before = -1 if window is None else window - 1  # the kernel counts the tokens before a token, -1 for all
    options: dict[str, Any] = {"scale": scaling, "window_size": (before, 0)}
    if TAKES_GROUPED:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, *bounds, *longest, **options)
    assert isinstance(out, Tensor)
    return out


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
