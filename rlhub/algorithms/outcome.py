"""One number per sample from its tokens, and back: the two passes over the whole batch that group estimators make.

Both are written for their cost, since the arithmetic between them is on a few thousand numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.masked import kept, masked

BLOCK = 64
CACHED_ROWS = 64  # whose product with the mask stays in the cache
SMALL = 1 << 16  # numbers, for which the cost does not matter
DENSE_SHARE = 0.1  # above this share of blocks with rewards, going through all of them is cheaper than picking


def outcome_rewards(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """R_i = sum_t r_{i,t} m_{i,t}, (batch,) float64.

    Rewards are nearly always one number in a row of zeros: only those that are not zero are read with their mask and added
    in float64, so samples whose few rewards are the same numbers have exactly equal outcomes.  A large batch with rewards on
    most tokens (KL in the reward) is added within blocks in its own precision, blocks in float64.
    """
    rows, width = token_level_rewards.shape
    rest = width % BLOCK
    rewards, mask = token_level_rewards[:, : width - rest], response_mask[:, : width - rest]
    total = masked(token_level_rewards[:, width - rest :], response_mask[:, width - rest :]).sum(1, dtype=torch.float64)
    if rewards.numel() == 0:
        return total
    blocks, keep = rewards.reshape(rows, -1, BLOCK), mask.reshape(rows, -1, BLOCK)
    busy = blocks.contiguous().view(torch.uint8).amax(2)  # one pass over the bytes: 0 where all rewards are
    row, block = busy.nonzero(as_tuple=True)
    if len(row) > DENSE_SHARE * busy.numel() and rewards.numel() > SMALL:
        parts = zip(torch.split(blocks, CACHED_ROWS), torch.split(keep, CACHED_ROWS), strict=True)
        sums = [kept(part, part_keep).sum(2) for part, part_keep in parts]
        return total + torch.cat(sums).sum(1, dtype=torch.float64)
    picked = blocks[row, block]
    part, column = picked.nonzero(as_tuple=True)
    counted = mask[row[part], block[part] * BLOCK + column]
    return total.index_add(0, row[part], masked(picked[part, column].double(), counted))


def on_tokens(per_sample: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A_{i,t} = a_i m_{i,t}, (batch, response) in `dtype`; exactly 0 outside the mask whatever a_i is."""
    values = per_sample.to(dtype)[:, None]
    if response_mask.dtype == torch.bool or not bool(values.isfinite().all()):
        return masked(values.expand(response_mask.shape), response_mask)
    if response_mask.dtype == dtype:
        return response_mask * values
    out = torch.empty(response_mask.shape, dtype=dtype, device=response_mask.device)
    parts = (torch.split(column, CACHED_ROWS) for column in (out, response_mask, values))
    for part, keep, value in zip(*parts, strict=True):
        part.copy_(keep).mul_(value)  # half the cost of choosing, or of a product of two dtypes
    return out
