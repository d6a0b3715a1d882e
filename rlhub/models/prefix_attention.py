"""Attention over rows that share prefixes, registered with transformers as `rlhub_prefix`.

The distinct tokens of a forest of rows are computed once.  Each row has some tokens of its own, one after the other, behind a
prefix whose tokens belong to rows before it.  Its own tokens are the queries; its whole chain, prefix and own tokens, are the
keys; so a token attends to its ancestors and itself, and the work is that of the distinct tokens' scores.  Keys and values of a
prefix are copied for each row that reads them, and their gradients are summed.

Rows with prefixes and own tokens of similar lengths are one batch of the ordinary kernel, with a mask that is aligned at the
lower right.  On CUDA with half precision the variable-length kernel, which aligns so by itself, takes all rows at once.
`flex_attention` is not used: it has no backward pass on CPU (torch 2.13), and on CUDA it compiles for new shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlhub.errors import EngineError
from rlhub.models.device_copies import to_device
from rlhub.models.packed_attention import MIN_GROUP_TOKENS, NEW_GROUP_RATIO, TRANSFORMED_SCORES, refuse_arguments, variable_length

PREFIX_ATTENTION = "rlhub_prefix"
MIXED_SCORES = 1 << 17
"""The most scores of a batch whose prefixes differ in length, which needs a mask for each row."""
REFUSED = ("dropout", *TRANSFORMED_SCORES)
"""Arguments of attention functions that the kernels here do not follow."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """Rows that one kernel call takes, right-padded to `own` tokens behind prefixes left-padded to `prefix` tokens.

    ends: (rows,) the padding before each prefix; None where there is none.
    """

    rows: int
    prefix: int
    own: int
    ends: Tensor | None

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Returns the mask (own, prefix + own), or (rows, 1, own, prefix + own) with padded prefixes, True where a query attends
        to a key; None for the plain causal one."""
        if self.prefix == 0 and window is None:
            return None
        width = self.prefix + self.own
        mask = torch.ones(self.own, width, dtype=torch.bool, device=device).tril(self.prefix)
        if window is not None:
            mask = mask.triu(self.prefix + 1 - window)
        if self.ends is None:
            return mask
        return mask & (torch.arange(width, device=device) >= self.ends[:, None])[:, None, None]


@dataclass(slots=True, kw_only=True)
class PrefixPlan:
    """The places of N distinct tokens in the batches of queries and of keys.

    batches: the kernel calls.
    queries, keys: the token at each place of all batches.
    restore: (N,) the place of each token among the queries.
    chains: the tokens of every row from its first to its last, one row after the other.
    query_bounds, key_bounds: (rows + 1,) int32, the first own token of each row and of each chain, and the end.
    longest: the longest row's own tokens, and the longest chain.
    """

    batches: list[Batch]
    queries: Tensor
    keys: Tensor
    restore: Tensor
    chains: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    longest: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        """Returns N."""
        return int(self.restore.shape[0])


def plan_prefix_attention(chains: Sequence[Tensor], shared: Sequence[int], device: torch.device) -> PrefixPlan:
    """Returns the plan of a forest.

    chains: the tokens of each row that has some of its own, by their places in the packed axis, on the CPU; the rows' own tokens
        are numbered one row after the other.
    shared: the tokens at the start of each chain that rows before it have.
    """
    own = [len(chain) - prefix for chain, prefix in zip(chains, shared, strict=True)]
    groups = batch_rows(own, shared)
    batches = [_batch([shared[row] for row in rows], [own[row] for row in rows], device) for rows in groups]
    keys, queries, restore, count = [], [], torch.empty(sum(own), dtype=torch.int64), 0
    for batch, rows in zip(batches, groups, strict=True):
        for row in rows:
            keys.append(_padded(chains[row], batch, shared[row]))
            restore[chains[row][shared[row] :]] = torch.arange(count, count + own[row])
            queries.append(keys[-1][batch.prefix :])
            count += batch.own
    lengths = [len(chain) for chain in chains]
    return PrefixPlan(
        batches=batches,
        queries=to_device(torch.cat(queries), device),
        keys=to_device(torch.cat(keys), device),
        restore=to_device(restore, device),
        chains=to_device(torch.cat(list(chains)), device),
        query_bounds=_bounds(own, device),
        key_bounds=_bounds(lengths, device),
        longest=(max(own), max(lengths)),
    )


def _padded(chain: Tensor, batch: Batch, shared: int) -> Tensor:
    """Returns the tokens at the places of a row in its batch; at padding they are its first or its last."""
    places = torch.arange(batch.prefix + batch.own) - (batch.prefix - shared)
    return chain[places.clamp(0, len(chain) - 1)]


def _batch(prefixes: list[int], own: list[int], device: torch.device) -> Batch:
    longest = max(prefixes)
    ends = torch.tensor([longest - prefix for prefix in prefixes])
    return Batch(rows=len(own), prefix=longest, own=max(own), ends=to_device(ends, device) if bool(ends.any()) else None)


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def batch_rows(own: Sequence[int], shared: Sequence[int]) -> list[list[int]]:
    """Returns the rows of each kernel call: those with equally long prefixes and similarly many own tokens, and any others that
    are short."""
    batches: list[list[int]] = []
    count = prefix = longest = 0
    for row in sorted(range(len(own)), key=lambda i: (-shared[i], -own[i], i)):
        most = max(longest, own[row])
        similar = own[row] >= NEW_GROUP_RATIO * longest or count * longest < MIN_GROUP_TOKENS
        if not batches or not (shared[row] == prefix and similar or (count + 1) * most * (prefix + most) <= MIXED_SCORES):
            batches.append([])
            prefix, most = shared[row], own[row]
        batches[-1].append(row)
        count, longest = len(batches[-1]), most
    return batches


class _Copies(torch.autograd.Function):
    """Maps tokens (N, ...) to their copies (M, ...); gradients of a token's copies are summed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = tokens.shape[0]
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (places,), grad = ctx.saved_tensors, grads[0]
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.count, *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, places, grad.to(wide)).to(grad.dtype), None


def prefix_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: PrefixPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the signature of transformers' attention functions; returns (1, tokens, heads, width).

    query: (1, heads, tokens, width).
    key, value: (1, kv heads, tokens, width).
    packing: the plan of the rows.
    others: of these, sliding_window is the number of tokens of its row that a token attends to, itself included; None for all
        before it.
    Raises EngineError where the model does not pass the plan, or asks for what rows that share tokens cannot have.
    """
    plan = _checked(packing, query.shape[2], others)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    window: int | None = others.get("sliding_window")
    if window is not None and window >= plan.longest[1]:
        window = None
    return attend_prefixes(query, key, value, plan, scaling=scaling, window=window)[None], None


def _checked(packing: PrefixPlan | None, num_tokens: int, others: Mapping[str, Any]) -> PrefixPlan:
    """Returns the plan.  Raises the errors of `prefix_attention`."""
    if packing is None or packing.num_tokens != num_tokens:
        raise EngineError(
            f"prefix attention was given no plan for its {num_tokens} tokens: this model does not pass attention arguments "
            "through; set actor.prefix_packing=false"
        )
    refuse_arguments(others, REFUSED, "prefix attention", "actor.prefix_packing=false")
    return packing


def attend_prefixes(
    query: Tensor, key: Tensor, value: Tensor, plan: PrefixPlan, *, scaling: float | None = None, window: int | None = None
) -> Tensor:
    """Computes attention of each token over its ancestors and itself; returns (tokens, heads, width).

    query: (tokens, heads, width).
    key, value: (tokens, kv heads, width).
    scaling: the factor of the scores; None is 1 / sqrt(width).
    window: the number of tokens of its chain that a token attends to, itself included; None for all before it.
    """
    ragged = query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)
    places = plan.chains if ragged else plan.keys
    keys, values = (_Copies.apply(tensor, places) for tensor in (key, value))  # type: ignore[no-untyped-call]
    if ragged:
        bounds = (plan.query_bounds, plan.key_bounds)
        return variable_length(query, keys, values, bounds, plan.longest, scaling=scaling, window=window)
    outs = _attend(query.index_select(0, plan.queries), keys, values, plan, scaling, window)
    return outs.index_select(0, plan.restore)


def _attend(query: Tensor, key: Tensor, value: Tensor, plan: PrefixPlan, scaling: float | None, window: int | None) -> Tensor:
    """Computes all batches one after the other; returns the queries' places."""
    grouped = query.shape[1] != key.shape[1]
    outs, first, first_key = [], 0, 0
    for batch in plan.batches:
        last, last_key = first + batch.rows * batch.own, first_key + batch.rows * (batch.prefix + batch.own)
        parts = (query[first:last], key[first_key:last_key], value[first_key:last_key])
        q, k, v = (torch.unflatten(part, 0, (batch.rows, -1)).transpose(1, 2) for part in parts)
        mask = batch.mask(window, query.device)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        first, first_key = last, last_key
    return outs[0] if len(outs) == 1 else torch.cat(outs)


AttentionInterface.register(PREFIX_ATTENTION, prefix_attention)
