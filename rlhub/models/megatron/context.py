"""Context parallelism: each rank has a slice of the packed tokens, and around attention tokens are exchanged for heads.

As in DeepSpeed-Ulysses (arXiv:2309.14509): attention, the one place where tokens meet, is computed by each rank for all
tokens with a share of the heads.  All else is computed token by token, on slices of the line without regard to rows.
"""

from __future__ import annotations

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad


def own_tokens(num_tokens: int, config: TransformerConfig) -> slice:
    """Of packed tokens the slice that is this context-parallel rank's.  All are equally long, and a multiple of the
    tensor-parallel ranks under sequence parallelism: the last may end after the tokens, where padding is."""
    share = config.tensor_model_parallel_size if config.sequence_parallel else 1
    count = -(-num_tokens // (config.context_parallel_size * share)) * share
    first = parallel_state.get_context_parallel_rank() * count
    return slice(first, first + count)


def cut(tokens: Tensor, own: slice) -> Tensor:
    """That slice of the last axis, which may end before it; filled up with zeros."""
    present = tokens[..., own]
    return pad(present, (0, own.stop - own.start - present.shape[-1]))


def tokens_for_heads(*tensors: Tensor) -> list[Tensor]:
    """(own tokens, heads, width) each -> (all tokens, heads / ranks, width) each, in one exchange over the context group.

    Query, key and value are cut alike, so each rank's query heads come with the key-value heads they belong to.
    """
    group = parallel_state.get_context_parallel_group()
    shares = [tensor.unflatten(1, (group.size(), -1)) for tensor in tensors]
    sent = torch.cat(shares, 2).transpose(0, 1)  # (rank, own tokens, its heads of all tensors, width)
    received: Tensor = all_to_all(group, sent.contiguous())
    return list(received.flatten(0, 1).split([share.shape[2] for share in shares], 1))


def heads_for_tokens(tensor: Tensor) -> Tensor:
    """(all tokens, heads / ranks, width) -> (own tokens, heads, width): the way back."""
    group = parallel_state.get_context_parallel_group()
    sent = tensor.unflatten(0, (group.size(), -1))  # (rank, its tokens, own heads, width)
    received: Tensor = all_to_all(group, sent.contiguous())
    return received.transpose(0, 1).flatten(1, 2)
