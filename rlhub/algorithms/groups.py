"""Statistics of sample groups (the samples of one prompt), vectorised over all groups of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked_sum


@dataclass(slots=True, kw_only=True)
class GroupStatistics:
    """Per row: its group's size, mean and unbiased standard deviation (0 for a singleton), and whether all its rewards are
    equal.  (batch,) each, float64.  The counts are over groups."""

    size: Tensor
    mean: Tensor
    std: Tensor
    equal: Tensor
    num_groups: int
    num_equal: int
    num_singleton: int

    def metrics(self) -> dict[str, float]:
        """Shares of groups that carry no learning signal."""
        return {
            "groups/num": float(self.num_groups),
            "groups/all_equal": self.num_equal / max(self.num_groups, 1),
            "groups/singleton": self.num_singleton / max(self.num_groups, 1),
        }


def outcome_rewards(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """R_i = sum_t r_{i,t} m_{i,t}, (batch,) float64."""
    return masked_sum(token_level_rewards.double(), response_mask, dim=1)


def group_statistics(rewards: Tensor, group: Tensor) -> GroupStatistics:
    """Mean, spread and size of each row's group.

    rewards: (batch,) float64; group: (batch,) int64 ids, any values.  A group whose rewards are all equal is found by
    comparing its extremes, never by its rounded variance.
    """
    _, index = torch.unique(group, return_inverse=True)
    num_groups = int(index.max().item()) + 1 if index.numel() else 0
    zeros = torch.zeros(num_groups, dtype=rewards.dtype, device=rewards.device)
    size = zeros.index_add(0, index, torch.ones_like(rewards))
    mean = zeros.index_add(0, index, rewards) / size
    squares = zeros.index_add(0, index, (rewards - mean[index]).square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    top = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    bottom = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    equal = (top == bottom) & (size > 1)
    return GroupStatistics(
        size=size[index],
        mean=mean[index],
        std=std[index],
        equal=equal[index],
        num_groups=num_groups,
        num_equal=int(equal.sum().item()),
        num_singleton=int((size == 1).sum().item()),
    )
