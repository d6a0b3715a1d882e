"""One number per sample from its tokens, and back: the two passes over the whole batch that group estimators make; and the check
that every reward stands on a token that trains.

All are written for their cost, since the arithmetic between them is on a few thousand numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.masked import kept, masked
from rlhub.errors import ProtocolError

BLOCK = 64
CACHED_ROWS = 128  # whose product with the mask stays in the cache
SAMPLE = 256  # blocks, in which the share of tokens with a reward is measured
DENSE_SHARE = 0.1  # of them, above which adding up all tokens is cheaper than picking
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of a number's bits, by its bytes


def outcome_rewards(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """R_i = sum_t r_{i,t} m_{i,t}, (batch,) float64.

    Rewards are nearly always one number in a row of zeros: only those that are not zero are read with their mask and added
    in float64, so samples whose few rewards are the same numbers have exactly equal outcomes.  A large batch with rewards on
    most tokens (KL in the reward) is added within blocks in its own precision, blocks in float64.
    """
    rows, width = token_level_rewards.shape
    found = _rewarded(token_level_rewards)
    if found is None:
        return _added_up(token_level_rewards, response_mask)
    place, rewards = found
    counted = masked(rewards.double(), response_mask.take(place))
    total = torch.zeros(rows, dtype=torch.float64, device=rewards.device)
    return total.index_add_(0, place // max(width, 1), counted)


def check_rewards(rewards: Tensor, mask: Tensor) -> None:
    """ProtocolError for a reward outside the mask, where it would train nothing and no estimator would say so.

    rewards, mask: (batch, response).  A row without any token in the mask, as a sample without a valid score, has no place for
    its reward and is passed over; so is NaN outside the mask, which is nobody's reward.
    """
    width, found = max(rewards.shape[1], 1), _rewarded(rewards)
    if found is not None:
        place = found[0][(mask.take(found[0]) == 0) & ~found[1].isnan()]
    else:
        inside = kept(rewards, mask)
        if torch.equal(inside, rewards):
            return
        place = rewards.sub(inside).nan_to_num_(nan=0.0).view(-1).nonzero().squeeze(1)
    place = place[mask.bool().any(1).take(place // width)] if len(place) else place
    if len(place):
        row, token = divmod(int(place[0]), width)
        raise ProtocolError(
            f"row {row}, token {token}: a reward of {float(rewards[row, token]):g} stands where response_mask is 0, so it would "
            f"train nothing ({len(place)} such tokens). Put rewards on tokens that the model wrote: the reward of a whole "
            "response on the last of them, as Trajectory.set_reward and rewards.naive.on_last_token do"
        )


def _rewarded(token_level_rewards: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where rewards are not 0, as places in the flattened batch, and the rewards there; None if a large batch has so many that
    going through all tokens is cheaper."""
    numbers = token_level_rewards.detach().reshape(-1)
    rest = numbers.numel() % BLOCK  # blocks go on over the ends of rows, so that any width is as cheap
    blocks = numbers[: numbers.numel() - rest].view(-1, BLOCK)
    busy = blocks.view(torch.uint8).amax(1).nonzero().squeeze(1)  # one pass over the bytes: 0 where all rewards are
    if 2 * len(busy) > len(blocks) > SAMPLE and _share(blocks[busy[:SAMPLE]]) > DENSE_SHARE:
        return None
    picked, start = blocks.index_select(0, busy).view(-1), busy * BLOCK
    if rest:
        picked = torch.cat([picked, numbers[-rest:]])
        start = torch.cat([start, start.new_tensor([numbers.numel() - rest])])
    found = picked.nonzero().squeeze(1)
    return start.take(found // BLOCK).add_(found % BLOCK), picked.take(found)


def _share(numbers: Tensor) -> float:
    return int(numbers.count_nonzero()) / numbers.numel()


def _added_up(rewards: Tensor, mask: Tensor) -> Tensor:
    """As `outcome_rewards`, by adding up all tokens."""
    blocks, sums = rewards.shape[1] // BLOCK, []
    for part, keep in zip(torch.split(rewards, CACHED_ROWS), torch.split(mask, CACHED_ROWS), strict=True):
        inside = kept(part, keep)
        whole, rest = inside[:, : blocks * BLOCK], inside[:, blocks * BLOCK :]
        by_block = whole.reshape(len(whole), blocks, BLOCK).sum(2)
        sums.append(by_block.sum(1, dtype=torch.float64) + rest.sum(1, dtype=torch.float64))
    return torch.cat(sums)


def on_tokens(per_sample: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A_{i,t} = a_i m_{i,t}, (batch, response) in `dtype`, for a mask of zeros and ones; exactly 0 outside it whatever a_i is.

    The bits of a_i are multiplied as an integer: 0 even for NaN, and a mask of integers is cheaper to narrow than to convert.
    """
    bits = per_sample.to(dtype)[:, None].view(WORDS[dtype.itemsize])
    mask = response_mask.view(torch.uint8) if response_mask.dtype == torch.bool else response_mask
    out = torch.empty(mask.shape, dtype=bits.dtype, device=mask.device)
    parts = (torch.split(column, CACHED_ROWS) for column in (out, mask, bits))
    for part, keep, value in zip(*parts, strict=True):
        part.copy_(keep).mul_(value)
    return out.view(dtype)
